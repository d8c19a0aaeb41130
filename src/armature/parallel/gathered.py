"""What ranks gather of sharded weights for their forwards, so that ranks which differ in it are
named.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from armature.errors import ConfigError
from armature.parallel import dtensors


@dataclass(frozen=True)
class _Kept:
    """A whole weight that stayed gathered after a forward, as it was then."""

    name: str
    holder: nn.Module
    key: str
    weight: Tensor
    version: int
    sums: Tensor | None  # which also see a change of `weight.data`; None: not taken

    def has_changed(self) -> bool:
        if getattr(self.holder, self.key) is not self.weight:  # it is sharded now
            return False
        unlike = self.sums is not None and not dtensors.alike(dtensors.sums(self.weight), self.sums)
        return unlike or self.weight._version != self.version


class Gathered:
    """Counts how often this rank gathered each unit of sharded models, and knows the whole weights.

    A collective knows its tensors by their order alone: ranks that gather different units of one
    size at the same time
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
        self._kept: dict[tuple[int, str], _Kept] = {}  # by unit and weight

    def watch(self, name: str, model: nn.Module, *, staged: bool = False) -> None:
        """Watch the units of a model. Call it after `fully_shard`.

        Args:
            staged: a pipeline's schedule calls backward, in parts that give whole weights their
                gradients for a time.
        """
        for path, unit in model.named_modules():
            if isinstance(unit, FSDPModule) and (own := _weights_of(cast(nn.Module, unit))):
                self._watch_unit(
                    f"{name}.{path}" if path else name, cast(nn.Module, unit), own, staged=staged
                )

    def _watch_unit(
        self, name: str, unit: nn.Module, own: list[tuple[str, nn.Module, str]], *, staged: bool
    ) -> None:
        index = len(self.names)
        self.names.append(name)
        self.counts.append(0)
        (_, holder, weight), *_ = own
        # gathered weights have none, or that of a tensor axis alone
        mesh = getattr(holder, weight).device_mesh
        knows_whole = False

        def before(*_: Any) -> None:
            if getattr(getattr(holder, weight), "device_mesh", None) == mesh:
                self.counts[index] += 1
                self.order = hash((self.order, index))  # of numbers: the same in all processes

        def after(*_: Any) -> None:
            nonlocal knows_whole
            if not knows_whole:  # torch makes them once
                self._whole += [
                    (f"{name}.{path}", weakref.ref(getattr(part, weight)))
                    for path, part, weight in own
                ]
                knows_whole = True

        forwards_left = dtensors.WATCHED_FORWARDS  # of sums, which cost time

        def keep(*_: Any) -> None:
            nonlocal forwards_left
            for path, part, key in own:
                weight = getattr(part, key)
                # that has no version
                if getattr(weight, "device_mesh", None) != mesh and not weight.is_inference():
                    summed = (
                        forwards_left
                        and not isinstance(weight, DTensor)
                        and dtensors.counts(weight)
                    )
                    sums = dtensors.sums(weight.detach()) if summed else None
                    kept = _Kept(f"{name}.{path}", part, key, weight, weight._version, sums)
                    self._kept[index, path] = kept
            forwards_left = max(0, forwards_left - 1)

        # as torch's own hooks are: users may compile the unit
        untraced: Any = torch.compiler.disable
        # of torch's own hook, which gathers
        unit.register_forward_pre_hook(untraced(before), prepend=True)
        if not staged:
            unit.register_forward_pre_hook(untraced(after))
            unit.register_forward_hook(untraced(dtensors.unobserved(keep)))

    def forget(self) -> None:
        """Forget what stayed gathered after earlier forwards."""
        self._kept.clear()

    def require_unchanged(self, module: nn.Module, *, layout: str) -> None:
        """Raise ConfigError if a weight was changed after the forward that had gathered it, which
        would be lost.
        """
        for kept in self._kept.values():
            if kept.has_changed():
                raise ConfigError(
                    f"{type(module).__name__}.training_step changes {kept.name} after the model's "
                    "forward, which has "
                    f"gathered a copy of it for backward under {layout}: the change would be lost. "
                    "Change it before "
                    "the forward or in on_train_batch_end, or type strategy=ddp."
                )

    def require_reduced(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, layout: str
    ) -> None:
        """Raise ConfigError if a whole weight has a gradient, which no optimizer sees.

        Backward takes those it made.
        """
        name = next(
            (name for name, weight in self._whole if getattr(weight(), "grad", None) is not None),
            None,
        )
        if name is not None:
            raise ConfigError(
                f"{type(module).__name__}: the step of {type(optimizer).__name__} did not see the "
                f"gradient of {name}, "
                f"a copy that {layout} gathered for the forward. Call self.manual_backward(loss) "
                "instead of setting "
                "p.grad yourself, or type strategy=single trainer.devices=1."
            )


def _weights_of(unit: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the path, module and name of each weight that is sharded with this unit, not with one
    inside it.
    """

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
