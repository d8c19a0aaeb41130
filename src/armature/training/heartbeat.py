"""Heartbeats of a rank, for the process that watches the ranks (`launcher.watch`) or the ranks' own
`HangWatch`.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.launcher import environment
from armature.parallel import process_group
from armature.training import blocked
from armature.training.hang_watch import HangWatch, Pulse, is_needed
from armature.training.not_finite import RolledBack
from armature.training.progress import completed_batches

MIN_INTERVAL_SECONDS = 1.0  # between two beats: a beat is a system call


class Heartbeat(Callback):
    """Note when a batch has ended or a save begins: in a file of this rank, and for its own watch.

    The first beat comes at the end of the first training batch, so imports, data and compilation
    may take any time. The file holds the seconds of the slowest optimizer step so far, or `inf`
    until one is measured and while no step is due (between epochs, in validation and in a save). If
    nothing watches (one process without a parent of ours), do nothing.

    Args:
        timeout: launch.hang_timeout.
        logs: the run directory's folder of logs.
        record: called with the error with which the rank's own watch ends it.
    """

    def __init__(
        self,
        *,
        timeout: float | str | None = None,
        logs: Path | None = None,
        record: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        folder = environment.heartbeat_folder()
        self._file = folder / str(os.getpid()) if folder else None
        self._pulse, self._watch = Pulse(), None
        if logs is not None and is_needed():
            # agents of several machines count restarts differently, so rank 0 names the attempt
            attempt = process_group.broadcast_object(os.urandom(4).hex())
            self._watch = HangWatch(
                self._pulse,
                timeout=timeout,
                attempt=attempt,
                logs=logs,
                place=self._place,
                record=record,
            )
        self._trainer: Trainer | None = None
        self._next = 0.0
        self._begun = False
        # seconds of a step, without the first after a start, a validation or a save
        self._slowest = 0.0
        self._step_began: float | None = None
        self._resting = False

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self._resting:
            self._resting = False
            self._beat()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._file is None and self._watch is None:
            return
        now = time.monotonic()
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            if self._step_began is not None:
                self._slowest = max(self._slowest, now - self._step_began)
            self._step_began = now
        if now >= self._next:
            self._beat()
            if not self._begun:
                self._begun = True
                self._begin(trainer)
        if trainer.is_last_batch:  # hooks at an epoch's end and new loaders may take any time
            self.rest()

    def _begin(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self._file is not None:
            blocked.answer_requests(self._file.parent, place=self._place)
        if self._watch is not None:
            self._watch.start()

    def _place(self) -> str:
        assert self._trainer is not None
        stage = self._trainer.state.stage
        return f"{stage.value if stage else 'ending'} after step {completed_batches(self._trainer)}"

    def _beat(self) -> None:
        self._next = time.monotonic() + MIN_INTERVAL_SECONDS
        slowest = math.inf if self._resting else self._slowest or math.inf
        self._pulse.slowest, self._pulse.beats = slowest, self._pulse.beats + 1
        if self._file is not None:
            with suppress(OSError):  # a missed beat must not end the run
                self._file.write_text(str(slowest))

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

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.rest()
        self._beat_if_due()

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """End this rank's own watch: an error or the end of fit follows, or another fit in this
        process.
        """
        if self._watch is not None:
            self._watch.stop()

    teardown = stop

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, RolledBack):  # everything is built anew, which may take any time
            self.rest()
        self.stop()
