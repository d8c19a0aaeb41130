"""End a rank that makes no progress, with the stacks of its threads in its log.

`faulthandler` counts the seconds in a C thread, so it also ends a rank in a call that never lets
Python run. A process that a signal has stopped cannot end itself: the ranks that wait for it end,
and the launcher kills it (`launcher.watch`).
"""

import faulthandler
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from armature import files
from armature.launcher import environment, hang
from armature.training.progress import completed_batches

# launch.hang_timeout=auto: the larger of these seconds and slowest steps
AUTO_SECONDS, AUTO_STEPS = 300.0, 20
START_SECONDS = 600.0  # for each part of the start behind preparing the data
# for a first batch, which may compile; with auto also for a save and the hooks between two batches
REST_SECONDS = 1800.0
INTERVAL_SECONDS = 1.0  # between two renewals: each starts a thread and writes a file
FLIGHT_SECONDS = 2.0  # before the end, at which the collectives in flight are noted


class Watchdog(Callback):
    """Give this rank some seconds for each batch, save and part of the start.

    One process that nobody watches is left alone: it may wait in a debugger.

    Args:
        timeout: launch.hang_timeout: seconds, auto or None (never).
        log: receives the stacks.
    """

    def __init__(self, timeout: float | str | None, *, log: Path) -> None:
        self.timeout, self.slowest = timeout, 0.0  # seconds of the slowest step
        self._folder = environment.heartbeat_folder()
        watched = environment.world_size() > 1 or self._folder is not None
        # a simulated rank has no log, and waits for nobody
        self._log = log if timeout is not None and watched and log.is_file() else None
        self._log_size = log.stat().st_size if self._log is not None else 0
        self._file: TextIO | None = None  # the log, while a limit runs
        self._flight = threading.Timer(0, self._note_flight)
        self._trained = False  # a batch has ended
        self._step_began: float | None = None  # of the optimizer step; None after a rest
        self._rests = True
        self._next = 0.0
        self.starts("building")

    def starts(self, place: str) -> None:
        """Note a part of the start."""
        self._allow(max(START_SECONDS, self._typed), place)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.starts("starting")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, rested = time.monotonic(), self._rests
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            if self._step_began is not None:
                self.slowest = max(self.slowest, now - self._step_began)
            self._step_began = now
        self._trained, self._rests = True, False
        if trainer.is_last_batch:
            self.rest(trainer)
        elif rested or now >= self._next:
            automatic = max(AUTO_SECONDS, AUTO_STEPS * self.slowest)
            self._allow(self._typed or automatic, _place(trainer))

    def rest(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Note that something else than a step comes next: validation, a save, hooks, compiling."""
        self._step_began, self._rests = None, True
        seconds = self._typed if self._trained and self._typed else max(REST_SECONDS, self._typed)
        self._allow(seconds, _place(trainer))

    on_train_start = on_validation_start = on_test_start = on_save_checkpoint = rest

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next:
            self.rest(trainer)

    on_test_batch_end = on_train_epoch_start = on_validation_batch_end

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Allow any time: an error, the end, or another fit in this process follows."""
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._flight.cancel()
            self._note("ending", None)
            self._file.close()
            self._file = None

    teardown = on_exception = stop

    @property
    def _typed(self) -> float:
        return 0.0 if self.timeout in ("auto", None) else float(self.timeout)

    def _allow(self, seconds: float, place: str) -> None:
        """End this rank unless this method or `stop` is called within so many seconds."""
        if self._log is None:
            return
        self._file = self._file or self._log.open("a")
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)
        self._next = time.monotonic() + min(INTERVAL_SECONDS, seconds / 4)
        self._flight.cancel()
        before = min(FLIGHT_SECONDS, seconds / 4)
        self._flight = threading.Timer(seconds - before, self._note_flight)
        self._flight.daemon = True
        self._flight.start()
        self._note(place, seconds)

    def _note(self, place: str, seconds: float | None) -> None:
        """Tell the launcher, if there is one, where this rank is and when it ends itself."""
        if self._folder is not None:
            deadline = None if seconds is None else time.monotonic() + seconds
            note = hang.Progress(place, seconds, deadline, self._log_size)
            with suppress(OSError):  # a full disk ends no run
                (self._folder / str(os.getpid())).write_text(json.dumps(note))

    def _note_flight(self) -> None:
        if self._folder is not None:
            file = self._folder / hang.FLIGHT.format(rank=environment.rank())
            with suppress(OSError):
                files.replace(file, json.dumps(collectives_in_flight()))


def _place(trainer: Trainer) -> str:
    stage = trainer.state.stage
    return f"{stage.value if stage else 'ending'} after step {completed_batches(trainer)}"


def collectives_in_flight() -> list[str]:
    """Return what torch's flight recorder says of collectives that this rank has begun and not
    finished, oldest first.
    """
    recorder: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, NCCL's
        if (dump := getattr(recorder, name, None)) is not None:
            entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
            found += [
                f"{each['profiling_name'].partition(':')[2]} of {each['input_sizes']}, "
                f"number {each['p2p_seq_id' if each['is_p2p'] else 'collective_seq_id']} of "
                f"group {each['process_group'][1]}"
                for each in entries
                if not each["retired"] and each["state"] != "completed"
            ]
    return found
