"""Callbacks that slow down or break one rank's model, whatever the strategy.

Imported by the ranks.
"""

import math
import time

from lightning.pytorch import Callback
from torch import Tensor

from armature.parallel.gradients import local_part
from armature.training import stragglers
from armature.training.step_log import StepLog


class Slow(Callback):
    """Compare the ranks at each write, and let the last one sleep in each forward.

    Args:
        seconds: in a forward.
        part: the module that sleeps.
    """

    def __init__(self, seconds: float, part: str) -> None:
        self.seconds, self.part = seconds, part

    def on_train_start(self, trainer, pl_module):
        stragglers.CHECK_SECONDS = 0.0
        StepLog.of(trainer).stragglers._next = 0.0
        if trainer.global_rank == trainer.world_size - 1:
            module = pl_module.get_submodule(self.part)
            module.register_forward_pre_hook(lambda *args: time.sleep(self.seconds))


class Breaks(Callback):
    """Let the embedding return NaN for batches with samples of one step, also after a rollback and
    in a replay.

    Args:
        step: at the first time.
    """

    tokens: Tensor | None = None  # of the step; kept over a rollback, which builds everything anew

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
