"""Heartbeats of a rank, for the process that watches the ranks (`armature.launcher.watch`)."""

import math
import os
import time
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.launcher import environment
from armature.training import blocked
from armature.training.progress import completed_batches

MIN_INTERVAL_SECONDS = 1.0  # between two beats: a beat is a system call


class Heartbeat(Callback):
    """Write to a file of this rank when a batch has ended or a save begins.

    The first beat comes at the end of the first training batch, so imports, data and compilation may take any time.
    The file holds the seconds of the slowest optimizer step so far, or `inf` until one is measured and while no step is
    due (between epochs, in validation and in a save).
    Without a watching process (ARMATURE_HEARTBEATS is not set), do nothing.
    """

    def __init__(self) -> None:
        self._folder = environment.heartbeat_folder()
        self._file = self._folder / str(os.getpid()) if self._folder else None
        self._next = 0.0 if self._folder else math.inf
        self._begun = self._answers = False
        self.slowest = math.inf  # seconds of a step, without the first after a start, a validation or a save
        self._step_began: float | None = None
        self._resting = False

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._resting:
            self._resting = False
            self._beat()

    def on_train_batch_end(
        self, trainer: Any = None, pl_module: Any = None, outputs: Any = None, batch: Any = None, batch_idx: int = 0
    ) -> None:
        if self._file is None:
            return
        now = time.monotonic()
        if trainer is not None and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            if self._step_began is not None:
                took = now - self._step_began
                self.slowest = took if self.slowest == math.inf else max(self.slowest, took)
            self._step_began = now
        if now >= self._next:
            self._begun = True
            self._beat()
            if trainer is not None and not self._answers:
                self._answer_requests(trainer)
        if trainer is not None and trainer.is_last_batch:  # hooks at an epoch's end and new loaders may take any time
            self.rest()

    def _answer_requests(self, trainer: Trainer) -> None:
        assert self._folder is not None
        self._answers = True

        def place() -> str:
            stage = trainer.state.stage
            return f"{stage.value if stage else 'ending'} after step {completed_batches(trainer)}"

        blocked.answer_requests(self._folder, place=place)

    def _beat(self) -> None:
        self._next = time.monotonic() + MIN_INTERVAL_SECONDS
        assert self._file is not None
        with suppress(OSError):  # a missed beat must not end the run
            self._file.write_text("inf" if self._resting else repr(self.slowest))

    def _beat_if_due(self, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next and self._begun:
            self._beat()

    on_validation_batch_end = on_test_batch_end = on_train_epoch_start = _beat_if_due

    def rest(self, *args: Any, **kwargs: Any) -> None:
        """Note that no step is due until the next training batch begins."""
        self._step_began = None
        if self._begun and not self._resting:
            self._resting = True
            self._beat()

    on_validation_start = on_test_start = on_train_epoch_end = on_train_end = on_fit_end = rest

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._beat_if_due()
        self.rest()
