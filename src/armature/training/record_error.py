"""Records the error that ends a rank, for the process that started it."""

from __future__ import annotations

from contextlib import suppress

from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from armature.data.memory import is_missing
from armature.errors import EndedByCode, MicroBatchTooLarge
from armature.launcher import environment
from armature.strategies.base import StrategyMixin
from armature.training import memory, micro_batch
from armature.training.refusals import advice_on, refusal_of
from armature.training.stop import StoppedBySignal
from armature.training.trainer import Trainer as OurTrainer


def record(error: BaseException) -> None:
    """Record an error for the agent, which shows the earliest one.

    Only a rank's first call counts.
    """
    file = environment.error_file()
    if file is not None and not file.exists():
        if isinstance(error, SystemExit | KeyboardInterrupt):
            error = EndedByCode.by(error)
        get_error_handler().record_exception(error)


class RecordError(Callback):
    """Record an error at once: Trainer teardown closes connections, and another rank would seem to
    fail first.

    Attributes:
        smaller: what to continue with, if memory has run out and a smaller micro-batch is to be
            tried.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.smaller: micro_batch.Smaller | None = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        together = isinstance(exception, StoppedBySignal)  # on all ranks
        if isinstance(trainer, OurTrainer):
            trainer.failed = not together
        if is_missing(exception):
            with suppress(Exception):  # an explanation must not hide the error
                exception.add_note(memory.explain(self.cfg, trainer, pl_module))
            with suppress(Exception):
                self.smaller = micro_batch.smaller(self.cfg, exception, trainer, pl_module)
        if self.smaller is not None:
            again = "The same command continues with it; launch.max_restarts=1 does so by itself."
            exception.add_note(f"{self.smaller.line} {again}")
            record(MicroBatchTooLarge(self.smaller.line))
        elif not together:
            if (advice := advice_on(exception)) is not None:
                exception.add_note(advice)
            refusal = refusal_of(exception, pl_module)
            if refusal is None and (strategy := StrategyMixin.find(trainer)) is not None:
                strategy.explain(exception)
            record(refusal or exception)
