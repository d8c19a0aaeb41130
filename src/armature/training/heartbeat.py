"""Heartbeats of a rank, for the process that watches the ranks (`armature.launcher.watch`)."""

import math
import os
import time
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.launcher import environment

MIN_INTERVAL_SECONDS = 1.0  # between two beats: a beat is a system call


class Heartbeat(Callback):
    """Touch a file of this rank when a batch has ended or a save begins.

    The first beat comes at the end of the first training batch, so imports, data and compilation may take any time.
    Without a watching process (ARMATURE_HEARTBEATS is not set), do nothing.
    """

    def __init__(self) -> None:
        folder = environment.heartbeat_folder()
        self._file = folder / str(os.getpid()) if folder else None
        self._next = 0.0 if folder else math.inf
        self._begun = False

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next:
            self._begun = True
            self._beat()

    def _beat(self) -> None:
        self._next = time.monotonic() + MIN_INTERVAL_SECONDS
        assert self._file is not None
        with suppress(OSError):  # a missed beat must not end the run
            self._file.touch()

    def _beat_if_due(self, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next and self._begun:
            self._beat()

    on_validation_batch_end = on_test_batch_end = _beat_if_due
    on_train_epoch_start = on_validation_start = on_test_start = on_fit_end = _beat_if_due

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._beat_if_due()
