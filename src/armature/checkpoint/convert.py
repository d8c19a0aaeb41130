"""Convert a checkpoint's weights to one safetensors file and back, in one process and without the model."""

from __future__ import annotations

from pathlib import Path

import torch

from armature.checkpoint import state, storage
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError

MODEL = "model."  # the attribute of the LightningModule, which safetensors files for others do not name


def to_safetensors(checkpoint: Path, file: Path, *, average: bool = False) -> list[str]:
    """Write the unsharded weights, or their moving average, and return their names, the model's own ("blocks.0.…").

    A parameter with two names is written under the first.
    """
    from safetensors.torch import save_file

    try:
        weights = state.load_full_state_dict(checkpoint, prefix=f"{state.EXTRA}.ema." if average else "")
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None
    if not weights:
        raise ConfigError(
            f"{checkpoint} holds no averaged weights: leave --average out, or train with the EMA callback."
        )
    weights = {name.removeprefix(MODEL): value.contiguous() for name, value in weights.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    save_file(weights, part, metadata={"format": "pt"})
    part.replace(file)
    return list(weights)


def from_file(file: Path, checkpoint: Path) -> list[str]:
    """Write a checkpoint of weights only: evaluate and generate read it, and training can start from it.

    Args:
        file: safetensors, with the model's own names; or Lightning's .ckpt, of which only tensors and plain values are
            read, and only the weights are kept.
    """
    from safetensors.torch import load_file

    if not file.is_file():
        raise ConfigError(f"{file}: no such file.")
    if file.suffix == ".ckpt":
        weights = storage.read_plain(file).get("state_dict")
        if not weights:
            raise ConfigError(f"{file}: it holds no state_dict, as Lightning's checkpoints do.")
    else:
        weights = {f"{MODEL}{name}": value for name, value in load_file(file).items()}
    meta = {"global_step": 0, "param_groups": [], "torch": str(torch.__version__)}
    CheckpointWriter().save(checkpoint, weights, meta, entries={"step": 0, "strategy": f"converted from {file.name}"})
    return list(weights)
