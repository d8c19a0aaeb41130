"""End a run between two steps, on all ranks together, after a signal or at a deadline."""

import signal
import time
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.parallel import process_group
from armature.training.run_hooks import RunHooks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Why a run stops. If ranks have different reasons, the one that comes last here counts
REASONS = ("", "max_time", "time_limit", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGINT")


class StoppedBySignal(Exception):
    """Raised by all ranks together to end training, validation or test after a signal or at a
    deadline.
    """


class StopOnSignal(RunHooks, Callback):
    """Let a signal set a flag only; the ranks vote on it after each optimizer step and stop
    together.

    A handler that acts in the middle of a step may enter a collective that another rank never
    enters. `trainer.should_stop`, which users' code may set on one rank, travels with that vote. A
    second Ctrl-C ends the process at once.

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
        self._seconds_before = 0.0  # training time of earlier processes of this run
        self._started: float | None = None
        self._vote, self._agreed = process_group.Vote(), False

    def install(self) -> None:
        """Install the handlers.

        Called before the Trainer is set up, which a signal must not interrupt either.
        """
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()
        self.step_ended(trainer)

    def step_ended(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Stop if a rank wants to. Called by all ranks, equally often.

        Not through trainer.should_stop, after which Lightning would validate first. On GPUs both
        wishes are read one step late, with one process as with many: the host runs ahead.
        """
        device = trainer.strategy.root_device
        if self.received is None and device.type == "cuda":
            wishes = self._own_reason(), int(trainer.should_stop)
            reason, stops = self._vote(*wishes, device=device)
            trainer.should_stop = self._agreed = bool(stops or (self._agreed and wishes[1]))
            self.received = REASONS[reason] or None
        elif self.received is None:
            self.received = REASONS[agree(trainer, self._own_reason())] or None
        if self.received is not None:
            raise StoppedBySignal(self.received)

    on_validation_batch_end = on_test_batch_end = step_ended


def agree(trainer: Trainer, reason: int = 0) -> int:
    """Let `trainer.should_stop` hold on all ranks if a rank has set it.

    Return the largest reason. Called by all ranks, equally often.
    """
    reason, stops = process_group.all_max(reason, int(trainer.should_stop))
    trainer.should_stop = bool(stops)
    return reason


def seconds_of(max_time: str | None) -> float | None:
    """Return the seconds of DD:HH:MM:SS; None: no limit."""
    if max_time is None:
        return None
    days, hours, minutes, seconds = map(int, max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
