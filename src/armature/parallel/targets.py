"""Each target of an optimizer step has the same weight, whatever micro-batch it is in.

A model's loss is the mean over one micro-batch's targets, whose number varies, since prompts and
padding do not count. A mean of such means would depend on the number of ranks and on accumulation.
So each micro-batch's loss is multiplied by its number of targets, and the gradients and the logged
loss are divided by the mean number per micro-batch, which is known at the end of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from armature.models.loss import IGNORED
from armature.parallel.step_sum import StepSum

# numbers of targets are counted in units, so that a loss times a number fits into fp16
TARGETS_PER_UNIT = 1024.0
MIN_TARGETS = 1e-12


def weigh(loss: Tensor, weight: Tensor | None) -> Tensor:
    """Return loss × weight; 0, with a graph, if the weight is that of no targets: many models' mean
    is then NaN.
    """
    return loss if weight is None else torch.where(weight > MIN_TARGETS, loss * weight, 0.0)


class TargetWeights:
    """Weighs one rank's micro-batches by their numbers of targets.

    Attributes:
        batch_targets: the number of targets in the newest batch, in units of `TARGETS_PER_UNIT`; a
            0-dim fp32 tensor, or None if its targets are not counted.
        step_targets: the same of this step so far, on this rank.
        step_sum: adds them up over the ranks.
    """

    def __init__(self) -> None:
        self.step_sum = StepSum()
        self.reset()

    def reset(self) -> None:
        self.batch_targets: Tensor | None = None
        self.step_targets: Tensor | None = None
        self._micro_batches = 0
        self._gradient_scale: Tensor | None = None
        self.step_sum.forget()

    def count_batch(self, batch: Any) -> None:
        """Count the targets of a batch if it is a dictionary whose "targets" are whole numbers."""
        if self._gradient_scale is not None:
            self.reset()
        self.batch_targets = None
        targets = batch.get("targets") if isinstance(batch, dict) else None
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            count = (targets != IGNORED).sum(dtype=torch.float32)
            # never 0: a pipeline divides by it
            self.batch_targets = count.clamp(min=MIN_TARGETS) / TARGETS_PER_UNIT

    def weight_loss(
        self, loss: Tensor, *, micro_batches: int, ranks: int, travels_with_norm: bool = False
    ) -> Tensor:
        """Return the loss multiplied by the number of targets, to call backward on.

        With the last of the step's `micro_batches`, ranks start to add up their numbers while
        backward runs, unless the numbers travel with the gradient's norm (`add_up`).
        """
        if self.batch_targets is None:
            return loss
        so_far = self.step_targets
        self.step_targets = (
            self.batch_targets.clone() if so_far is None else so_far + self.batch_targets
        )
        self._micro_batches += 1
        if self._micro_batches == micro_batches and ranks > 1 and not travels_with_norm:
            self.step_sum.start(self.step_targets)
        return weigh(loss, self.batch_targets)

    def add_up(self, squares: Tensor) -> Tensor:
        """Return the sum of `squares` over all ranks; the step's targets travel with it unless they
        were sent before.

        All ranks must call this, after the step's last micro-batch.
        """
        return self.step_sum.add_up(
            squares, self.step_targets if self._gradient_scale is None else None
        )

    def gradient_scale(self, *, micro_batches: int, ranks: int) -> Tensor | None:
        """Return the factor still to be applied to the step's gradients, or None if no targets were
        counted.

        A 0-dim fp32 tensor, the same on every rank. All ranks must call this, after the step's last
        micro-batch.
        """
        if self._gradient_scale is None and self.step_targets is not None:
            targets = self.step_sum.targets() if ranks > 1 else self.step_targets
            if targets is None:  # nothing was sent: the epoch ended with fewer micro-batches
                self.step_sum.start(self.step_targets)
                targets = self.step_sum.targets()
                assert targets is not None
            self._gradient_scale = micro_batches * ranks / targets
        return self._gradient_scale
