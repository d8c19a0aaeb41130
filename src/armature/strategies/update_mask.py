"""Leave out optimizer steps whose gradient is not finite, on all ranks alike (`trainer.on_nan`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

# where a number is not read without waiting for everything computed before it
DEVICE_TYPES = ("cuda", "mps", "xpu")


class StepLeftOut(Exception):
    """Ends an optimizer's `step` before it has changed anything; caught by the strategy."""


class UpdateMask:
    """Decide between backward and the optimizer's update whether the step counts.

    The norm of the gradient is the same on every rank, and NaN or infinite as soon as one rank's
    gradient is, so it tells all of them. A CPU has computed it already and reads it. On a GPU the
    flag stays there: a fused optimizer takes it as `found_inf`, which torch has for its loss
    scaler. For an optimizer without that the host waits for the flag. Buffers such as BatchNorm's
    statistics get their values of before a step that is left out.

    Attributes:
        left_out: whether the newest step was left out, as far as the host knows.
        found: 1 if the newest step was left out and 0 otherwise, where the host does not know;
            0-dim.
    """

    def __init__(self, module: LightningModule) -> None:
        self.left_out = False
        self.found: Tensor | None = None
        self._on_device = False  # whether the optimizer reads the flag, once that is known
        self._module = module
        # owner, name and value of each buffer
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    def step_begins(self) -> None:
        """Called before each forward: remember the buffers as they were before the first of a
        step.
        """
        if not self._before:
            self._before = [
                (owner, name, old.detach().clone()) for owner, name, old in buffers_of(self._module)
            ]

    def apply(self, optimizer: Optimizer, norm: Tensor) -> None:
        """Leave out the update that follows if `norm` is not finite.

        Raises:
            StepLeftOut: if the host knows it.
        """
        if norm.device.type in DEVICE_TYPES:
            fused = self._on_device or _masks_itself(optimizer, norm.device)
            self._on_device = fused and (self._on_device or not _creates_state(optimizer))
        if self._on_device:
            self.found = (~torch.isfinite(norm)).to(norm.dtype)
            optimizer.found_inf = self.found  # pyright: ignore[reportAttributeAccessIssue]
            return
        self.left_out = not math.isfinite(norm)
        if self.left_out:
            raise StepLeftOut

    def step_ended(self) -> None:
        """Called after the update: give the buffers their values of before a step that was left
        out.
        """
        if self._before:
            self._restore_buffers()

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        before, self._before = self._before, []
        for owner, name, old in before:
            buffer = getattr(owner, name)  # the module may have put another tensor there
            if buffer is None or buffer.shape != old.shape:
                if self.left_out:
                    setattr(owner, name, old)
            elif self.left_out:
                buffer.copy_(old)
            elif self.found is not None:
                buffer.copy_(torch.where(self.found.to(buffer.device) > 0, old, buffer))


def buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each buffer with the module and the name that it is registered under."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            yield owner, name, buffer


def _masks_itself(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether the kernels read `found_inf`, but for a step that creates the optimizer's
    state.
    """
    if device.type == "mps":  # its kernels are given the flag and ignore it
        return False
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return fused and all(
        param.device == device for group in optimizer.param_groups for param in group["params"]
    )


def _creates_state(optimizer: Optimizer) -> bool:
    """Return whether the next step is the first of an optimizer that has state.

    SGD without momentum has none.
    """
    return not optimizer.state and any(
        group.get("momentum") != 0 for group in optimizer.param_groups
    )
