"""The first values of this rank that are not finite: in a batch, in modules, in the loss or in
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from armature.parallel.gradients import local_part

PLACES = ("samples", "forward", "loss", "backward", "parameter")  # in the order of a step


@dataclass(frozen=True)
class Finding:
    """The first values of this rank that are not finite."""

    place: str  # one of PLACES
    name: str  # of the module, the parameter or the entry of the batch
    kind: str  # NaN or infinite
    order: int  # counts what was looked at before
    stage: int = 0  # of a pipeline
    # indices, if only some samples of the micro-batch are affected
    samples: list[int] = field(default_factory=list)
    clean: bool = True  # of a module: its inputs were finite

    @property
    def key(self) -> tuple[int, int, int]:
        return (
            PLACES.index(self.place),
            self.stage if self.place == "forward" else -self.stage,
            self.order,
        )

    def __str__(self) -> str:
        subject = {
            "samples": f"batch[{self.name!r}] as it comes from the data",
            "forward": f"the output of {self.name}",
            "loss": "the loss, of finite outputs of all modules,",
            "backward": f"the gradient that leaves {self.name} in backward",
            "parameter": f"the gradient of {self.name}",
        }[self.place]
        return f"{subject} is the first that is {self.kind}"


class FiniteWatch:
    """Look at the batch, the modules' outputs, the loss and the gradients of one micro-batch, in
    their order.

    Each look waits for the device.

    Args:
        indices: of the samples of the micro-batch, to name those that are affected.
        stage: of a pipeline, that this rank holds.
    """

    def __init__(self, indices: list[int] | None = None, *, stage: int = 0) -> None:
        self.indices, self.stage, self.order = indices or [], stage, 0
        self.findings: list[Finding] = []

    def first(self) -> Finding | None:
        """Return the first finding. Infinity is often meant, as in a mask; NaN never is."""
        found = sorted(self.findings, key=lambda each: each.key)
        nan = next((each for each in found if each.kind == "NaN"), None)
        return nan if nan is not None and nan.clean else next(iter(found), None)

    def look_at(self, place: str, name: str, tensor: Tensor, *, clean: bool = True) -> None:
        self.order += 1
        if any(each.kind == "NaN" for each in self.findings if each.place == place):
            return
        if (kind := kind_of(tensor)) is not None:
            samples = self._samples(tensor) if place in ("samples", "forward") else []
            self.findings.append(Finding(place, name, kind, self.order, self.stage, samples, clean))

    def look_at_batch(self, batch: Any) -> None:
        entries = (
            batch
            if isinstance(batch, dict)
            else dict(enumerate(batch if isinstance(batch, (list, tuple)) else [batch]))
        )
        for name, value in entries.items():
            for tensor in _tensors(value):
                self.look_at("samples", str(name), tensor)

    def look_at_gradients(self, module: nn.Module) -> None:
        for name, param in module.named_parameters():
            if param.grad is not None:
                self.look_at("parameter", name, param.grad)

    def _samples(self, tensor: Tensor) -> list[int]:
        """Return the samples whose values are not finite, unless all are affected or a row is no
        sample.
        """
        local = local_part(tensor).detach()
        if not local.ndim or len(local) != len(self.indices):
            return []
        bad = (
            (~torch.isfinite(local)).flatten(1).any(1) if local.ndim > 1 else ~torch.isfinite(local)
        )
        return [] if bad.all() else [self.indices[i] for i in bad.nonzero().flatten().tolist()]

    @contextmanager
    def in_forward(self, module: nn.Module, *, inside_compiled: bool = False) -> Iterator[None]:
        """Look at what each module returns, without those inside of compiled code, which must call
        no hooks.
        """
        handles = [
            part.register_forward_hook(partial(self._after, _called(name, part)))
            for name, part in (
                module.named_modules() if inside_compiled else _outside_compiled(module)
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def in_step(self, module: nn.Module) -> Iterator[None]:
        """Look at what each module takes and returns, and at the gradients that flow back there: in
        eager code.
        """
        handles = [
            part.register_forward_pre_hook(partial(self._before, _called(name, part)))
            for name, part in module.named_modules()
        ]
        handles += [
            param.register_hook(partial(self._gradient, "parameter", name))
            for name, param in module.named_parameters()
            if param.requires_grad
            and type(param) is nn.Parameter  # before it is reduced: this rank's own
        ]
        try:
            with self.in_forward(module, inside_compiled=True):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str, module: nn.Module, args: Any) -> None:
        for tensor in _tensors(args):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, "backward", name))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        clean = all(kind_of(tensor) is None for tensor in _tensors(args))
        for tensor in _tensors(output):
            self.look_at("forward", name, tensor, clean=clean)

    def _gradient(self, place: str, name: str, gradient: Tensor) -> None:
        self.look_at(place, name, gradient)


@torch.no_grad()
def kind_of(tensor: Tensor) -> str | None:
    """Return NaN or infinite if some values are; None if all are finite."""
    local = local_part(tensor).detach()
    local = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    if not local.numel():
        return None
    # the extremes keep NaN and infinity, and need no memory; isfinite would make copies of an
    # activation
    ends = torch.stack(torch.aminmax(local)).tolist()
    return (
        "NaN" if any(map(math.isnan, ends)) else "infinite" if any(map(math.isinf, ends)) else None
    )


def _called(name: str, module: nn.Module) -> str:
    return f"{name or type(module).__name__} ({type(module).__name__})"


def _outside_compiled(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if "forward" not in vars(module):  # parallel/blocks.py compiles a module's forward
        for key, child in module.named_children():
            yield from _outside_compiled(child, f"{name}.{key}" if name else key)
    yield name, module


def _tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested containers."""
    found: list[Tensor] = []
    apply_to_collection(
        value, Tensor, lambda tensor: found.append(tensor) if tensor.is_floating_point() else None
    )
    return found
