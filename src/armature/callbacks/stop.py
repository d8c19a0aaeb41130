"""Signals that end a run between two steps, on all ranks together."""

import signal
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


class StoppedBySignal(Exception):
    """Ends training, validation or test when a signal came; the ranks raise it together."""


class StopOnSignal(Callback):
    """A signal sets a flag and nothing else. The ranks agree on it after each batch and stop together.

    What a handler does in the middle of a step can meet a collective that another rank never enters. A second Ctrl-C
    ends the process at once.

    Attributes:
        received: the name of the signal that ends the run, on every rank once they agreed. None while there is none.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._flag = 0
        self._previous: dict[int, Any] = {}

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
        self._flag = number

    def agreed(self, trainer: Trainer) -> bool:
        """Whether any rank was signalled. A collective where there is more than one rank."""
        if self.received is None:
            number = self._flag
            if trainer.world_size > 1:
                flag = torch.tensor(float(number), device=trainer.strategy.root_device)
                number = int(trainer.strategy.reduce(flag, reduce_op="max"))
            if number:
                self.received = signal.Signals(number).name
        return self.received is not None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.agreed(trainer):
            raise StoppedBySignal(self.received)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        # not should_stop: Lightning would validate before it stops
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and self.agreed(trainer):
            raise StoppedBySignal(self.received)

    def _stop_evaluation(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self.agreed(trainer):
            raise StoppedBySignal(self.received)

    on_validation_batch_end = on_test_batch_end = _stop_evaluation
