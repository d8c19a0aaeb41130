"""Gradients that a pipeline's schedule has computed by the time that backward is called.

Lightning calls zero_grad between training_step and backward, but a schedule computes gradients
inside training_step. They are removed from the parameters there, and an autograd node
(`ScheduledLoss`) adds them in backward, so that accumulation, the division of the loss and clipping
need no special case.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from armature.parallel import gradients
from armature.parallel.gradients import local_part


class ScheduledLoss(torch.autograd.Function):
    """The loss of one step of the schedule, whose backward adds the gradients that the schedule
    computed.

    `grads` are those of the loss multiplied by `factor` (0-dim; None: 1).
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        params: list[Tensor],
        grads: list[Tensor | None],
        factor: Tensor | None,
    ) -> Tensor:
        ctx.pairs = [
            (param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None
        ]
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None, None]:
        (scale,) = grad_outputs
        scale = scale if ctx.factor is None else scale / ctx.factor
        gradients.multiply(gradients.local_parts(grad for _, grad in ctx.pairs), by=scale)
        for param, grad in ctx.pairs:
            if param.grad is None:
                param.grad = grad
            else:
                local_part(param.grad).add_(local_part(grad))
        return None, None, None, None


@contextmanager
def without_gradients(params: list[nn.Parameter]) -> Iterator[None]:
    """Remove the parameters' gradients inside the context, and restore the previous ones at its
    end.
    """
    previous = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, previous, strict=True):
            param.grad = grad
