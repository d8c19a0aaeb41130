"""Leave out optimizer steps whose gradient is not finite, on all ranks alike (`trainer.on_nan`)."""

import math
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class StepLeftOut(Exception):
    """Ends an optimizer's `step` before it has changed anything; caught by the strategy."""


class UpdateMask:
    """Decide between backward and the optimizer's update whether the step counts.

    The norm of the gradient is the same on every rank, and NaN or infinite as soon as one rank's
    gradient is, so it tells all of them. The host waits for it. Buffers such as BatchNorm's
    statistics get their values of before a step that is left out.

    Attributes:
        left_out: whether the newest step was left out.
    """

    def __init__(self, module: LightningModule) -> None:
        self.left_out = False
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

    def apply(self, norm: Tensor) -> None:
        """Leave out the update that follows if `norm` is not finite.

        Raises:
            StepLeftOut: it is not.
        """
        self.left_out = not math.isfinite(norm)
        if self.left_out:
            raise StepLeftOut

    @torch.no_grad()
    def step_ended(self) -> None:
        """Called after the update: give the buffers their values of before a step that was left
        out.
        """
        before, self._before = self._before, []
        for owner, name, old in before if self.left_out else ():
            buffer = getattr(owner, name)  # the module may have put another tensor there
            if buffer is None or buffer.shape != old.shape:
                setattr(owner, name, old)
            else:
                buffer.copy_(old)


def buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each buffer with the module and the name that it is registered under."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            yield owner, name, buffer
