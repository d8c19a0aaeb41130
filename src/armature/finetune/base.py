"""The base model of a run whose checkpoints hold only what it trains: recorded in each, compared
before it is read.

Torch-free.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from armature.checkpoint import directory
from armature.errors import ConfigError
from armature.finetune import folder

KEY = "base"  # of a manifest
_SAMPLE = 4096  # bytes, at the start, in the middle and at the end of each tensor


def record(path: Path) -> dict[str, str]:
    """Return what a manifest says of a base model, to know it again.

    The fingerprint covers config.json, the names, types and shapes of all tensors, and a sample of
    each tensor's bytes. It does not depend on where the folder is, or on how its tensors are spread
    over files. Raises ConfigError for a file that cannot be read.
    """
    digest = hashlib.sha256(folder.fingerprint(path).encode())
    for name, tensor in sorted(folder.weights(path).tensors.items()):
        digest.update(name.encode())
        digest.update(_sample(path / tensor.file, *tensor.span))
    return {"folder": str(path.absolute()), "fingerprint": digest.hexdigest()[:16]}


def _sample(file: Path, start: int, end: int) -> bytes:
    middle = start + (end - start - _SAMPLE) // 2
    found = []
    try:
        with file.open("rb") as opened:
            for place in dict.fromkeys(max(start, each) for each in (start, middle, end - _SAMPLE)):
                opened.seek(place)
                found.append(opened.read(min(_SAMPLE, end - place)))
    except OSError as error:
        raise ConfigError(f"{file}: it cannot be read ({error.strerror or error}).") from error
    return b"".join(found)


def recorded(checkpoint: Path | None) -> dict[str, str] | None:
    """Return the base model that a checkpoint leaves out, or None if it holds all weights."""
    manifest = None if checkpoint is None else directory.read_manifest(checkpoint)
    found = (manifest or {}).get(KEY)
    return {key: str(value) for key, value in found.items()} if isinstance(found, dict) else None


def found(name: str, needed: Mapping[str, str], checkpoint: Path) -> Path:
    """Return the folder of this name if it is the base model that a checkpoint leaves out.

    Args:
        name: of a folder, or of a model on Hugging Face's hub.
        needed: what the checkpoint says of its base model, as `record`.

    Raises:
        ConfigError: it is not there, or another model.
    """
    holds = f"{checkpoint} holds only what was trained. Its base model was {needed['folder']}."
    remedy = "Type model.pretrained=FOLDER with that model's folder, wherever it is now."
    try:
        path = folder.find(name)
        if problems := folder.weights(path).problems:
            raise ConfigError([*problems])
        if record(path)["fingerprint"] != needed["fingerprint"]:
            raise ConfigError(
                f"model.pretrained={name} is another model: its {folder.CONFIG} or its weights "
                "have other values."
            )
    except ConfigError as error:
        raise ConfigError([*error.problems, f"{holds} {remedy}"]) from None
    return path


def verified(cfg: Any, checkpoint: Path) -> Path | None:
    """Return the folder that a checkpoint's other weights are read from, or None if it holds them
    all.

    Args:
        cfg: of a run that has ended its checks: run.dir is where it is now.

    Raises:
        ConfigError: as `found`.
    """
    needed = recorded(checkpoint)
    return None if needed is None else found(str(name_of(cfg, checkpoint)), needed, checkpoint)


def name_of(cfg: Any, checkpoint: Path) -> str | None:
    """Return the name of a run's base model, or None if it has none: not that of the run's copy of
    its small files.
    """
    name, kept = OmegaConf.select(cfg, "model.pretrained"), folder.kept_in(Path(str(cfg.run.dir)))
    # by `check.relocate`
    is_copy = name is not None and kept is not None and Path(name).resolve() == kept.resolve()
    return (recorded(checkpoint) or {}).get("folder", name) if is_copy else name
