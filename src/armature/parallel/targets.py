"""Each target of an optimizer step weighs the same, whatever micro-batch it lies in.

A model's loss is the mean over the targets that count in one micro-batch. Where micro-batches have different numbers of
them (prompts and padding do not count), the mean of those means weighs a target the more, the fewer lie beside it: the
result would depend on the number of ranks and on accumulation. So each loss is multiplied by its number of targets, and
gradients and the logged loss are divided by the mean number, which is known at the end of the step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armature.models.loss import IGNORED

LEAST = 1e-12  # targets
UNIT = 1024.0  # targets: so that what a loss is multiplied by stays in the range of fp16


class TargetWeights:
    """Weighs one rank's micro-batches by their targets.

    Attributes:
        current: the number of targets in the newest batch, in UNITs, 0-dim; None where they are not counted.
        counted: in this step so far, on this rank; in the end on all. None: nothing was.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing was counted."""
        self.current: Tensor | None = None
        self.counted: Tensor | None = None
        self._micro_batches = 0
        self._sum: dist.Work | None = None
        self._scale: Tensor | None = None

    def begin(self, batch: Any) -> None:
        """Counts the targets of a batch, before `training_step` has it."""
        if self._scale is not None:
            self.forget()
        targets = batch.get("targets") if isinstance(batch, dict) else None
        counts = isinstance(targets, Tensor) and not targets.is_floating_point()
        # never 0, so that a pipeline can divide by it
        self.current = (targets != IGNORED).sum(dtype=torch.float32).clamp(min=LEAST) / UNIT if counts else None

    def multiply(self, loss: Tensor, *, micro_batches: int, ranks: int) -> Tensor:
        """What to go backward from: the loss multiplied by the number of targets.

        Ranks begin to add up their numbers with the last of `micro_batches`; by the end of backward they have done.
        """
        if self.current is None:
            return loss
        self.counted = self.current.clone() if self.counted is None else self.counted + self.current
        self._micro_batches += 1
        if self._micro_batches == micro_batches and ranks > 1:
            self._sum = dist.all_reduce(self.counted, async_op=True)
        return loss * self.current

    def scale(self, *, micro_batches: int, ranks: int) -> Tensor | None:
        """What the step's gradients are still to be multiplied by; None where nothing was counted.

        A 0-dim fp32 tensor, the same on every rank. Asked for after the step's last micro-batch, by all ranks.
        """
        if self._scale is None and self.counted is not None:
            if self._sum is not None:
                self._sum.wait()
            elif ranks > 1:  # an epoch that ends with fewer micro-batches
                dist.all_reduce(self.counted)
            self._scale = micro_batches * ranks / self.counted
        return self._scale
