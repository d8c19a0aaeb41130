"""The first module whose output is not finite, on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from armature.parallel.gradients import local_part


@dataclass(frozen=True)
class Finding:
    name: str  # of the module
    clean: bool  # its inputs were finite
    is_nan: bool  # else infinite, which is often meant, as in a mask


class FiniteWatch:
    """Look at the modules' outputs in their order. Each look waits for the device."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def first(self) -> Finding | None:
        """Return the first NaN out of finite inputs, or the first finding."""
        nan = next((each for each in self.findings if each.is_nan), None)
        return nan if nan is not None and nan.clean else next(iter(self.findings), None)

    @contextmanager
    def in_forward(self, module: nn.Module) -> Iterator[None]:
        """Look at what each module returns, without those inside of compiled code, which must call
        no hooks.
        """
        handles = [
            part.register_forward_hook(partial(self._after, name or type(part).__name__))
            for name, part in _outside_compiled(module)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        values = [tensor for tensor in _tensors(output) if not torch.isfinite(tensor).all()]
        if values:
            clean = all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(args))
            is_nan = any(bool(torch.isnan(tensor).any()) for tensor in values)
            called = f"{name} ({type(module).__name__})"
            self.findings.append(Finding(called, clean, is_nan))


def _outside_compiled(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if "forward" not in vars(module):  # parallel/blocks.py compiles a module's forward
        for key, child in module.named_children():
            yield from _outside_compiled(child, f"{name}.{key}" if name else key)
    yield name, module


def _tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested containers."""
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return [local_part(leaf).detach() for leaf in leaves if leaf.is_floating_point()]
