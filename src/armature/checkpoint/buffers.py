"""Buffers whose size changes while a run trains: checkpoints name them, so that a resume gives them
that size first.

A buffer that is registered as None has no size until code gives it a value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from armature.checkpoint import directory, storage

RESIZED = f"{directory.RESERVED}resized_buffers"  # in checkpoints: their names

Sizes = dict[str, tuple[int, ...] | None]
COPIED = (
    "Ranks put different values into {}, and each step begins with those of rank 0: what other "
    "ranks' samples have "
    "changed there is lost. Reduce what your code puts there over the ranks "
    "(self.all_gather(value).mean(0))."
)
NOT_COPIED = (
    "Checkpoints hold {} of rank 0 only, but other ranks have other values: this strategy does not "
    "copy buffers from "
    "rank to rank. A resume gives all ranks those of rank 0, so it is not exact. Reduce what your "
    "code puts there over "
    "the ranks (self.all_gather(value).mean(0)), or type strategy=ddp."
)


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


def sums(module: nn.Module, *, norms: bool = True) -> dict[str, float]:
    """Return a sum over each saved buffer that a rank has as a whole, to compare ranks.

    Args:
        norms: False: without BatchNorm's statistics, which ddp takes from rank 0 if they are not
            synchronized.
    """
    saved = nn.Module.state_dict(module).keys()
    if not norms:
        left_out = (name for name, part in module.named_modules() if isinstance(part, _NormBase))
        saved = saved - {
            f"{name}.{own}" for name in left_out for own in ("running_mean", "running_var")
        }
    return {
        name: _sum(buffer.detach())
        for name, buffer in module.named_buffers()
        if name in saved and not isinstance(buffer, DTensor)
    }


def _sum(buffer: Tensor) -> float:
    """Return the sum of absolute values, a part at a time: a memory bank in float64 may not fit
    beside itself.
    """
    parts = buffer.flatten().split(1 << 24) if buffer.layout == torch.strided else (buffer,)
    return float(sum((part if part.is_complex() else part.double()).abs().sum() for part in parts))


def unequal(of_ranks: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of the buffers that are not the same on all ranks, from the `sums` of
    each.
    """
    first = of_ranks[0]
    return sorted(
        {
            name
            for own in of_ranks
            for name in own
            if name not in first or _differ(own[name], first[name])
        }
    )


def _differ(a: float, b: float) -> bool:
    """Return whether sums differ by more than their order of addition, which depends on the CPU."""
    return not (math.isnan(a) and math.isnan(b)) and not math.isclose(a, b, rel_tol=1e-9)


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
