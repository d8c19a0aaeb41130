"""Buffers whose size changes while a run trains: checkpoints name them, so that a resume gives them
that size first.

A buffer that is registered as None has no size until code gives it a value.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from armature.checkpoint import directory, storage

RESIZED = f"{directory.RESERVED}resized_buffers"  # in checkpoints: their names

Sizes = dict[str, tuple[int, ...] | None]


def sizes(module: nn.Module) -> Sizes:
    return {
        name: None if buffer is None else tuple(buffer.shape)
        for name, buffer in _slots(module).items()
    }


def _slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers by name, also those that are None; one that several modules share by its
    first name.
    """
    found, seen = {}, set()
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is None or id(buffer) not in seen:
                found[f"{path}.{key}" if path else key] = buffer
                seen.add(id(buffer))
    return found


def resized(module: nn.Module, first: Sizes) -> list[str]:
    """Return the names of the buffers that do not have the sizes that they had at `first`."""
    return [name for name, size in sizes(module).items() if first.get(name, size) != size]


def resize(checkpoint: Path, module: L.LightningModule, names: Collection[str]) -> None:
    """Give these buffers the sizes that they had when the checkpoint was saved.

    None to those that it does not have.
    """
    if not names:
        return
    saved, own = storage.read_metadata(checkpoint).state_dict_metadata, _slots(module)
    kept = nn.Module.state_dict(module).keys()
    for name in names:
        buffer, value = own.get(name), None
        if name not in own or (name not in saved and name not in kept):
            continue
        if name in saved:
            facts = saved[name]
            given = (
                {"dtype": facts.properties.dtype, "device": module.device} if buffer is None else {}  # pyright: ignore[reportAttributeAccessIssue]
            )
            value = (torch.empty(0) if buffer is None else buffer).new_empty(facts.size, **given)  # pyright: ignore[reportAttributeAccessIssue]
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, value)
