"""Signals and deadlines that end a run between two steps, on all ranks together."""

import signal
import time
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.parallel import process_group
from armature.parallel.process_group import Vote

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
# why a run stops; where ranks have several reasons, the last in this list is the run's
REASONS = ("", "max_time", "time_limit", "SIGTERM", "SIGUSR1", "SIGINT")


# After so many votes in a row on steps of less than so many microseconds, so many steps share a vote
SHORT_VOTES, SHORT, STEPS_TOGETHER = 100, 10_000, 10
UNKNOWN = 10**12  # microseconds a step


class StoppedBySignal(Exception):
    """Ends training, validation or test when a signal or a deadline came; the ranks raise it together."""


class StopOnSignal(Callback):
    """A signal sets a flag and nothing else. The ranks agree on it after each optimizer step and stop together.

    What a handler does in the middle of a step can meet a collective that another rank never enters. Where there are
    several ranks they stop one step after the signal, since a vote is read when the next one is cast and nobody waits
    for it. Ten steps share a vote where they are so short that one after each would be felt (a vote of two ranks on
    busy CPUs took 0.2 to 0.7 ms): less than 10 ms, a hundred times running. A second Ctrl-C ends the process at once.

    Args:
        max_seconds: of training, over all restarts; None: no limit.
        deadline: Unix time at which to stop, so many minutes before a scheduler would.

    Attributes:
        received: what ends the run, one of REASONS, on every rank once they agreed. None while nothing does.
    """

    def __init__(self, *, max_seconds: float | None = None, deadline: float | None = None) -> None:
        self.received: str | None = None
        self.max_seconds, self.deadline = max_seconds, deadline
        self._flag = 0
        self._previous: dict[int, Any] = {}
        self._vote = Vote()
        self._steps, self._every = 0, 1  # votes are cast every so many steps: the same number on every rank
        self._short_votes = 0
        self._since: float | None = None  # the training step that was voted on last
        self._seconds_before = 0.0  # trained by the processes that this one goes on from
        self._started: float | None = None

    def install(self) -> None:
        """Takes the handlers over. Called before the Trainer's own set-up, which is not to be torn apart either."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._flag == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self._flag = self._flag or number  # the first: an agent passes a scheduler's USR1 on as a TERM

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds_before = state_dict["seconds"]

    def _seconds(self) -> float:
        return self._seconds_before + (time.monotonic() - self._started if self._started is not None else 0.0)

    def _own_reason(self) -> int:
        if self._flag:
            return REASONS.index(signal.Signals(self._flag).name)
        if self.deadline is not None and time.time() >= self.deadline:
            return REASONS.index("time_limit")
        if self.max_seconds is not None and self._seconds() >= self.max_seconds:
            return REASONS.index("max_time")
        return 0

    def _end_if_agreed(self, microseconds_a_step: int = UNKNOWN) -> None:
        if self.received is None:
            reason, slowest = self._vote(self._own_reason(), microseconds_a_step)
            self._short_votes = self._short_votes + 1 if 0 < slowest < SHORT else 0
            if reason:
                self._vote.finish()
                self.received = REASONS[reason]
        if self.received is not None:
            raise StoppedBySignal(self.received)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()
        self._end_if_agreed()
        self._end_if_agreed()  # the second call knows what came during the start

    def step_ended(self) -> None:
        """Not should_stop: Lightning would validate before it stops."""
        self._steps += 1
        if self._steps % self._every:
            return
        now, before = time.monotonic(), self._since
        self._since = now
        self._end_if_agreed(UNKNOWN if before is None else round((now - before) / self._every * 1e6))
        short = self._short_votes >= SHORT_VOTES and process_group.ranks() > 1
        self._every = STEPS_TOGETHER if short else 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._vote.finish()

    def _stop_evaluation(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._since = None  # its batches say nothing of a step's length
        self._end_if_agreed()

    on_validation_batch_end = on_test_batch_end = _stop_evaluation
