"""Callbacks that slow down or break one rank's model, whatever the strategy.

Imported by the ranks.
"""

import math
import time

from lightning.pytorch import Callback
from torch import Tensor

from armature.parallel.gradients import local_part


class Slow(Callback):
    """Let the last rank sleep before each forward.

    Args:
        seconds: of the sleep.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == trainer.world_size - 1:
            time.sleep(self.seconds)


class Breaks(Callback):
    """Let the embedding return NaN for the samples of one step."""

    tokens: Tensor | None = None  # of the step

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_start(self, trainer, pl_module):
        embed = pl_module.model.embed
        if embed is not None:  # of a pipeline, one stage holds it
            embed.register_forward_hook(self._break)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step - 1 and Breaks.tokens is None:
            Breaks.tokens = batch["inputs"].clone()

    @staticmethod
    def _break(embed, inputs, output):
        if Breaks.tokens is None or not embed.training:
            return output
        same = (local_part(inputs[0]).unsqueeze(1) == Breaks.tokens).all(dim=-1)
        return output * math.nan if same.any() else output
