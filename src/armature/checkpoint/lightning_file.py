"""One checkpoint in one file, as Lightning writes it."""

from pathlib import Path
from typing import Any

from torch import Tensor

from armature import files
from armature.checkpoint import directory, plain, storage
from armature.errors import ConfigError


def write(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint, which has its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not directory.is_local(path):  # an object store replaces an object as a whole
        storage.write_plain(path, checkpoint)
        return
    files.clear_parts(path.parent)  # of a process that was killed while it wrote
    with files.replacing(path) as part:
        storage.write_plain(part, checkpoint)
        if path.is_dir() and not path.is_symlink():
            directory.remove(path)  # one of another strategy's


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint with weights, as it was saved.

    Nothing but tensors and plain values is read.

    Raises:
        ConfigError: it holds anything else, or no weights.
    """
    try:
        checkpoint = storage.read_plain(path)
    except ConfigError as error:
        if "would run as code" not in str(error):
            raise
        raise ConfigError(
            f'{error} If you trust the file, write its weights into another: python -c "import '
            "torch; torch.save("
            f"{{'state_dict': torch.load('{path}', weights_only=False)['state_dict']}}, "
            "'weights.ckpt')\""
        ) from None
    weights = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(weights, dict) or not any(isinstance(v, Tensor) for v in weights.values()):
        raise ConfigError(
            f"{path}: it has no state_dict with tensors, as Lightning's checkpoints do. If it "
            'holds the weights themselves, put them into one: python -c "import torch; '
            f"torch.save({{'state_dict': torch.load('{path}')}}, 'weights.ckpt')\", and name "
            "weights.ckpt. Names must be those of your module: those of its attribute model begin "
            "with 'model.'."
        )
    return plain.restored(checkpoint)
