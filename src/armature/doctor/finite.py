"""The first module of this rank whose output is not finite, in the first batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armature.doctor.replicas import tensors_in


@dataclass(frozen=True)
class _Call:
    name: str
    output_is_bad: Tensor  # 0-dim, on the device
    input_is_bad: Tensor


class ModuleWatch:
    """Look at what modules take and return while `watching`; nothing waits for the device before `first_bad`."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        handles = [part.register_forward_hook(partial(self._note, name)) for name, part in _called(module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        bad = _is_bad(output)
        if bad is not None:
            self._calls.append(_Call(f"{name} ({type(module).__name__})", bad, _or_false(_is_bad(inputs), bad)))

    def first_bad(self) -> str:
        """Return a sentence about the first module with a bad output, or an empty one."""
        bad = next((call for call in self._calls if bool(call.output_is_bad)), None)
        if bad is None:
            return ""
        inputs = "its input is not finite either" if bool(bad.input_is_bad) else "its input is finite"
        return f"The first module whose output is not finite is {bad.name}; {inputs}."


def _called(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Return the named modules, inner ones first, without those inside of compiled code, which calls no hooks."""
    if "forward" not in vars(module):  # parallel/blocks.py compiles a module's forward
        for key, child in module.named_children():
            yield from _called(child, f"{name}.{key}" if name else key)
    if name:
        yield name, module


@torch.no_grad()
def _is_bad(value: Any) -> Tensor | None:
    """Return whether any of the floating-point tensors in a container is not finite (0-dim); None without any."""
    found = [each.to_local() if isinstance(each, DTensor) else each for each in tensors_in(value)]
    # the extremes keep NaN and infinity, and need no memory; isfinite would make copies of the activation
    ends = [torch.aminmax(each.detach()) for each in found if each.is_floating_point() and each.numel()]
    return torch.stack([~torch.isfinite(torch.stack(pair)).all() for pair in ends]).any() if ends else None


def _or_false(flag: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if flag is None else flag
