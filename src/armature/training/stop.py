"""End a run between two steps, on all ranks together, after a signal or at a deadline."""

import signal
import time
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.parallel import process_group
from armature.parallel.process_group import Vote
from armature.parallel.step_sum import StepSum
from armature.strategies.base import StrategyMixin

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
]
# Why a run stops. If ranks have different reasons, the one that comes last here counts
REASONS = ("", "max_time", "time_limit", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGINT")

# After SHORT_VOTES consecutive votes on steps under SHORT_MICROSECONDS, vote only every
# STEPS_PER_VOTE steps
SHORT_VOTES, SHORT_MICROSECONDS, STEPS_PER_VOTE = 100, 10_000, 10
UNKNOWN_MICROSECONDS = 10**12


class StoppedBySignal(Exception):
    """Raised by all ranks together to end training, validation or test after a signal or at a
    deadline.
    """


class StopOnSignal(Callback):
    """Let a signal set a flag only; the ranks vote on it after each optimizer step and stop
    together.

    A handler that acts in the middle of a step may enter a collective that another rank never
    enters. On CPUs, the wish to stop travels with what the ranks add up in a step anyway
    (`StepSum`): they stop after the step in which the signal came, or after the next one if it came
    once that sum was sent. Without such a sum, and on GPUs, whose sums
    the host does not read, they vote, and stop one step after the signal: a vote is read when the
    next one is cast, so
    nobody waits for it. A vote of two ranks on busy CPUs took 0.2 to 0.7 ms, so ten steps share one
    if a hundred in a row took less than 10 ms each. A second Ctrl-C ends the process at once.

    Args:
        max_seconds: training time over all restarts; None: no limit.
        deadline: Unix time at which to stop, some minutes before the scheduler's limit.

    Attributes:
        received: what ends the run, one of REASONS, once all ranks agree on it; None until then.
    """

    def __init__(self, *, max_seconds: float | None = None, deadline: float | None = None) -> None:
        self.received: str | None = None
        self.max_seconds, self.deadline = max_seconds, deadline
        self._flag = 0
        self._previous: dict[int, Any] = {}
        self._vote = Vote()
        self._sum: StepSum | None = None
        self._steps, self._every = 0, 1  # steps per vote: the same number on every rank
        self._short_votes = 0
        self._since: float | None = None  # time of the last vote during training
        self._seconds_before = 0.0  # training time of earlier processes of this run
        self._started: float | None = None

    def forget_module(self) -> None:
        """Drop what Lightning has set on this callback: methods of a module, which would keep its
        memory.
        """
        for name in ("log", "log_dict"):
            vars(self).pop(name, None)

    def install(self) -> None:
        """Install the handlers.

        Called before the Trainer is set up, which a signal must not interrupt either.
        """
        for number in SIGNALS:
            if (
                number == getattr(signal, "SIGHUP", None)
                and signal.getsignal(number) == signal.SIG_IGN
            ):
                continue  # nohup
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._flag == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        # the first one: an agent forwards a scheduler's USR1 as a TERM
        self._flag = self._flag or number

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds_before = state_dict["seconds"]

    def _seconds(self) -> float:
        return self._seconds_before + (
            time.monotonic() - self._started if self._started is not None else 0.0
        )

    def _own_reason(self) -> int:
        if self._flag:
            return REASONS.index(signal.Signals(self._flag).name)
        if self.deadline is not None and time.time() >= self.deadline:
            return REASONS.index("time_limit")
        if self.max_seconds is not None and self._seconds() >= self.max_seconds:
            return REASONS.index("max_time")
        return 0

    def _end_if_agreed(self, microseconds_per_step: int = UNKNOWN_MICROSECONDS) -> None:
        if self.received is None:
            reason, slowest = self._vote(self._own_reason(), microseconds_per_step)
            self._short_votes = self._short_votes + 1 if 0 < slowest < SHORT_MICROSECONDS else 0
            if reason:
                self._vote.finish()
                self.received = REASONS[reason]
        if self.received is not None:
            raise StoppedBySignal(self.received)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()
        if (strategy := StrategyMixin.find(trainer)) is not None:
            self._sum = strategy.target_weights.step_sum
            self._sum.wants_to_stop = lambda: self._own_reason() > 0
        self._end_if_agreed()
        self._end_if_agreed()  # the second vote sees what arrived during the start

    def step_ended(self, trainer: Trainer) -> None:
        """Stop if a rank wants to.

        Not through trainer.should_stop, after which Lightning would validate first.
        """
        wanted = self._sum.stop_is_wanted() if self._sum is not None else None
        if wanted is not None:
            if wanted:
                self._end_if_agreed()
                self._end_if_agreed()  # reads the vote on the reason
            return
        self._steps += 1
        if self._steps % self._every:
            return
        now, before = time.monotonic(), self._since
        self._since = now
        self._end_if_agreed(
            UNKNOWN_MICROSECONDS if before is None else round((now - before) / self._every * 1e6)
        )
        short = self._short_votes >= SHORT_VOTES and process_group.ranks() > 1
        self._every = STEPS_PER_VOTE if short else 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._vote.finish()

    def outside_of_steps(self, *args: Any, **kwargs: Any) -> None:
        """Stop if a rank wants to, in work that is no training step.

        Called by all ranks, equally often.
        """
        self._since = None  # it says nothing about the length of a step
        self._end_if_agreed()

    on_validation_batch_end = on_test_batch_end = outside_of_steps


def seconds_of(max_time: str | None) -> float | None:
    """Return the seconds of DD:HH:MM:SS; None: no limit."""
    if max_time is None:
        return None
    days, hours, minutes, seconds = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
