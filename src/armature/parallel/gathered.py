"""What ranks gather of sharded weights for their forwards, so that ranks which differ in it are named."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Gathered:
    """Counts how often this rank gathered each unit of sharded models, and knows the whole weights.

    A collective knows its tensors by their order alone: ranks that gather different units of one size at the same time
    mix their weights without an error.

    Attributes:
        names: of the units.
        counts: how often each was gathered for a forward.
        order: a number that is the same on ranks that gathered the same units in the same order.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.counts: list[int] = []
        self.order = 0
        self._whole: list[tuple[str, weakref.ref[Tensor]]] = []

    def watch(self, name: str, model: nn.Module, *, staged: bool = False) -> None:
        """Watch the units of a model. Call it after `fully_shard`.

        Args:
            staged: a pipeline's schedule calls backward, in parts that give whole weights their gradients for a time.
        """
        for path, unit in model.named_modules():
            if isinstance(unit, FSDPModule) and (own := _weights_of(cast(nn.Module, unit))):
                self._watch_unit(f"{name}.{path}" if path else name, cast(nn.Module, unit), own, staged=staged)

    def _watch_unit(self, name: str, unit: nn.Module, own: list[tuple[str, nn.Module, str]], *, staged: bool) -> None:
        index = len(self.names)
        self.names.append(name)
        self.counts.append(0)
        (_, holder, weight), *_ = own
        mesh = getattr(holder, weight).device_mesh  # gathered weights have none, or that of a tensor axis alone
        knows_whole = False

        def before(*_: Any) -> None:
            if getattr(getattr(holder, weight), "device_mesh", None) == mesh:
                self.counts[index] += 1
                self.order = hash((self.order, index))  # of numbers: the same in all processes

        def after(*_: Any) -> None:
            nonlocal knows_whole
            if not knows_whole:  # torch makes them once
                self._whole += [(f"{name}.{path}", weakref.ref(getattr(part, weight))) for path, part, weight in own]
                knows_whole = True

        untraced: Any = torch.compiler.disable  # as torch's own hooks are: users may compile the unit
        unit.register_forward_pre_hook(untraced(before), prepend=True)  # of torch's own hook, which gathers
        if not staged:
            unit.register_forward_pre_hook(untraced(after))

    def unreduced(self) -> str | None:
        """Return the name of a whole weight that has a gradient, which no optimizer sees, or None.

        Backward takes those that it made.
        """
        return next((name for name, weight in self._whole if getattr(weight(), "grad", None) is not None), None)


def _weights_of(unit: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the path, module and name of each weight that is sharded with this unit, not with one inside it."""

    def parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        yield path, module
        for name, child in module.named_children():
            if not isinstance(child, FSDPModule):
                yield from parts(child, f"{path}{name}.")

    return [
        (f"{path}{name}", part, name)
        for path, part in parts(unit, "")
        for name, weight in part.named_parameters(recurse=False)
        if isinstance(weight, DTensor)
    ]
