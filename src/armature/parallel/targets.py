"""Each target of an optimizer step has the same weight, whatever micro-batch it is in.

A model's loss is the mean over one micro-batch's targets, whose number varies, since prompts and
padding do not count. A mean of such means would depend on the number of ranks and on accumulation.
So each micro-batch's loss is multiplied by its number of targets, and the gradients and the logged
loss are divided by the mean number per micro-batch, which is known at the end of the step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armature.errors import ConfigError
from armature.models.loss import IGNORED

# numbers of targets are counted in units, so that a loss times a number fits into fp16
TARGETS_PER_UNIT = 1024.0
MIN_TARGETS = 1e-12


def weigh(loss: Tensor, weight: Tensor | None) -> Tensor:
    """Return loss × weight; 0, with a graph, if the weight is that of no targets: many models' mean
    is then NaN.
    """
    return loss if weight is None else torch.where(weight > MIN_TARGETS, loss * weight, 0.0)


def count(targets: Tensor) -> Tensor | None:
    """Return the number of targets, never 0, in units of `TARGETS_PER_UNIT`; a 0-dim fp32 tensor,
    or None if they are no classes.
    """
    if targets.is_floating_point():
        return None
    return (targets != IGNORED).sum(dtype=torch.float32).clamp(min=MIN_TARGETS) / TARGETS_PER_UNIT


class TargetWeights:
    """Weighs one rank's micro-batches by their numbers of targets.

    Attributes:
        batch_targets: the number of targets in the newest batch, in units of `TARGETS_PER_UNIT`; a
            0-dim fp32 tensor, or None if its targets are not counted.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.batch_targets: Tensor | None = None
        self._step_targets: Tensor | None = None  # of this step so far, on this rank
        self._micro_batches = 0
        self._sum: tuple[Tensor, Any] | None = None  # over the ranks, and what sends it
        self._gradient_scale: Tensor | None = None

    def count_batch(self, batch: Any, how: bool | Callable[[Any], Tensor] = True) -> None:
        """Count the targets of a batch: by a module's method, or if it is a dictionary whose
        "targets" are whole numbers.

        Raises:
            ConfigError: it has "labels" instead, of which a causal model leaves out the first.
        """
        if self._gradient_scale is not None:
            self.reset()
        if callable(how):
            self.batch_targets = how(batch).float().clamp(min=MIN_TARGETS) / TARGETS_PER_UNIT
            return
        found = batch if isinstance(batch, Mapping) else {}
        if "labels" in found and "targets" not in found:
            raise ConfigError(
                "mean_over_targets = True counts batch['targets'], and this batch has 'labels'. "
                "Write a method instead: def mean_over_targets(self, batch): return "
                "(batch['labels'] != -100).sum(), of a causal model of batch['labels'][:, 1:]."
            )
        targets = found.get("targets")
        self.batch_targets = count(targets) if isinstance(targets, Tensor) else None

    def weight_loss(self, loss: Tensor, *, micro_batches: int, ranks: int) -> Tensor:
        """Return the loss multiplied by the number of targets, to call backward on.

        With the last of the step's `micro_batches`, ranks start to add up their numbers, which
        travel while backward runs.
        """
        if self.batch_targets is None:
            return loss
        so_far = self._step_targets
        self._step_targets = (
            self.batch_targets.clone() if so_far is None else so_far + self.batch_targets
        )
        self._micro_batches += 1
        if self._micro_batches == micro_batches and ranks > 1:
            self._start_sum(self._step_targets)
        return weigh(loss, self.batch_targets)

    def _start_sum(self, targets: Tensor) -> tuple[Tensor, Any]:
        total = targets.clone()
        self._sum = total, dist.all_reduce(total, async_op=True)
        return self._sum

    def gradient_scale(self, *, micro_batches: int, ranks: int) -> Tensor | None:
        """Return the factor still to be applied to the step's gradients, or None if no targets were
        counted.

        A 0-dim fp32 tensor, the same on every rank. All ranks must call this, after the step's last
        micro-batch.
        """
        targets = self._step_targets
        if self._gradient_scale is None and targets is not None:
            if ranks > 1:  # not started: the epoch ended with fewer micro-batches
                targets, work = self._sum or self._start_sum(targets)
                work.wait()
            self._gradient_scale = micro_batches * ranks / targets
        return self._gradient_scale
