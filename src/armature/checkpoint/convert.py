"""Convert a checkpoint's weights to files for other programs and back, in one process."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armature import files
from armature.checkpoint import (
    directory,
    lightning_file,
    optimizers,
    schedules,
    state,
    storage,
)
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError

AVERAGES = f"{state.EXTRA}.ema."
# the attribute of the LightningModule, which safetensors files for others do not name
MODEL = "model."
# DPO's frozen copy of the model that it began with, which only more training needs
REFERENCE = "reference."

Base = Mapping[str, Tensor]  # weights that a checkpoint leaves out


def weights_of(
    checkpoint: Path, *, average: bool = False, base: Base | None = None
) -> dict[str, Tensor]:
    """Return the unsharded weights by their names in the LightningModule, or the moving average
    where there is one.

    Args:
        base: weights of these names, which the checkpoint may leave out.
    """
    weights = state.load_full_state_dict(checkpoint)
    averages = averages_of(checkpoint, weights) if average else weights
    if not averages:
        raise lacks_average(checkpoint)
    return {**(base or {}), **weights, **averages}


def lacks_average(checkpoint: Path) -> ConfigError:
    """Return the error for a checkpoint without the average that was asked for."""
    return ConfigError(
        f"{checkpoint} holds no averaged weights: leave --average out, or train with the EMA "
        "callback."
    )


def has_averages(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds the moving average of the weights."""
    if directory.is_file(checkpoint):
        return False
    return any(
        name.startswith(AVERAGES) for name in storage.read_metadata(checkpoint).state_dict_metadata
    )


def averages_of(checkpoint: Path, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the moving averages that a checkpoint holds by the names of its weights, all names of
    a tied one.

    Args:
        weights: those of the checkpoint.
    """
    averages = state.load_full_state_dict(checkpoint, prefix=AVERAGES)
    known = [name for name in averages if name in weights]
    for name in weights.keys() - averages:
        tied = (first for first in known if _is_same(weights[name], weights[first]))
        if (first := next(tied, None)) is not None:
            averages[name] = averages[first].clone()
    return averages


def _is_same(one: Any, other: Any) -> bool:
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and one.dtype == other.dtype and one.shape == other.shape and one.equal(other)


def to_safetensors(
    checkpoint: Path, file: Path, *, average: bool = False, base: Base | None = None
) -> list[str]:
    """Write the unsharded weights, or their moving average, and return their names, the model's own
    ("blocks.0.…").

    A parameter with two names is written under the first, a model's frozen reference not at all.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights = weights_of(checkpoint, average=average, base=base)
    weights = {
        name: value
        for name, value in weights.items()
        if not name.startswith(REFERENCE) or name.replace(REFERENCE, MODEL, 1) not in weights
    }
    first = {
        (value.data_ptr(), value.shape): name
        for name, value in reversed(weights.items())
        if value.numel()
    }
    weights = {
        name.removeprefix(MODEL): value.contiguous()
        for name, value in weights.items()
        if not value.numel() or first[value.data_ptr(), value.shape] == name
    }
    with files.replacing(file) as part:
        try:
            save_file(weights, part, metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk
            raise OSError(str(error)) from error
    return list(weights)


def to_ckpt(
    checkpoint: Path, file: Path, *, average: bool = False, base: Base | None = None
) -> list[str]:
    """Write one file as Lightning's Trainer does, which its `load_from_checkpoint` and
    `fit(ckpt_path=…)` read.

    Returns the names of the weights. With `average` the file holds no optimizer's state, which
    would not fit to them.
    """
    meta, weights = (
        storage.read_meta(checkpoint),
        weights_of(checkpoint, average=average, base=base),
    )
    saved: dict[str, Any] = storage.read_metadata(checkpoint).state_dict_metadata
    entries, others = meta.pop(state.OPTIMIZER, []), meta.pop(state.OTHER, {})
    meta = {key: value for key, value in meta.items() if not str(key).startswith(state.RESERVED)}
    result = {
        "pytorch-lightning_version": version("lightning"),
        "epoch": 0,
        "global_step": 0,
    } | meta
    result["lr_schedulers"] = [*map(schedules.without_held, result.get("lr_schedulers", ()))]
    result["state_dict"] = weights | others
    if not average:
        result[state.OPTIMIZER] = [
            {key: value for key, value in entry.items() if not str(key).startswith(state.RESERVED)}
            if optimizers.BUILT in entry
            else _torchs(checkpoint, saved, entry["param_groups"], index=i)
            for i, entry in enumerate(entries)
        ]
    lightning_file.write(file, result)
    return list(result["state_dict"])


def _torchs(
    checkpoint: Path, saved: dict[str, Any], groups: list[dict[str, Any]], *, index: int
) -> dict[str, Any]:
    """Return an optimizer's state as its `state_dict` would: parameters are numbered through all
    groups.
    """
    names = [name for group in groups for name in group[optimizers.NAMES]]
    numbers = {name: number for number, name in enumerate(names)}
    found = {
        numbers[name]: {
            full.rpartition(".")[2]: optimizers.value_of(value)
            for full, value in state.load_tensors(checkpoint, entries, saved).items()
        }
        for name, entries in optimizers.entry_names(saved, index).items()
        if name in numbers
    }
    numbered = [
        optimizers.settings_of(group)
        | {"params": [numbers[name] for name in group[optimizers.NAMES]]}
        for group in groups
    ]
    return {"state": dict(sorted(found.items())), "param_groups": numbered}


def from_file(file: Path, checkpoint: Path) -> list[str]:
    """Write a checkpoint of weights only: evaluate and generate read it, and training can start
    from it.

    Args:
        file: safetensors, with the model's own names; or one of Lightning's (.ckpt, .pt, .pth), of
            which only tensors and plain values are read, and only the weights are kept.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if directory.is_named_as_file(file):
        weights = lightning_file.read(file)["state_dict"]
        weights = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    else:
        try:
            weights = {f"{MODEL}{name}": value for name, value in load_file(file).items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise ConfigError(
                f"{file}: it cannot be read as safetensors: {error}. Write or download it again."
            ) from None
    meta = {"global_step": 0, "torch": str(torch.__version__)}
    CheckpointWriter().save(
        checkpoint, weights, meta, entries={"step": 0, "strategy": f"converted from {file.name}"}
    )
    return list(weights)
