"""Lightning's Trainer with our loops and without its signal handlers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from typing_extensions import override

from armature.strategies.base import StrategyMixin
from armature.training.loops import EpochLoop, FitLoop


class NoSignals:
    """Stands in for Lightning's signal handlers, which enter collectives and may hang."""

    received_sigterm = False

    def register_signal_handlers(self) -> None:
        """Register nothing: training/stop.py has the handlers."""

    def teardown(self) -> None:
        """There is nothing to restore."""


class LoggerConnector(_LoggerConnector):
    """Lightning's, with the number of optimizer steps as the step, and no work for values that nobody logs."""

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        super().log_metrics(metrics, step=self.trainer.global_step if step is None and "step" not in metrics else step)

    @override
    def on_batch_end(self) -> None:
        results = self.trainer._results
        if results:
            super().on_batch_end()
        elif results is not None:  # nothing was logged
            results.batch = results.batch_size = None


class Trainer(L.Trainer):
    """Train as Lightning's Trainer does, with these differences:

    - training/stop.py handles signals, instead of handlers that enter collectives and may hang;
    - validation also runs after the last step (training/loops.py);
    - loggers receive the number of optimizer steps made as the step, for training, validation and test alike.

    Args:
        before_training, step_ended: see `FitLoop` and `EpochLoop`.
        kwargs: Lightning's.
    """

    # Lightning reads the names of arguments here, for PL_TRAINER_* variables
    __signature__ = inspect.signature(L.Trainer)

    def __init__(
        self,
        *args: Any,
        before_training: Iterable[Callable[[Trainer], None]] = (),
        step_ended: Iterable[Callable[[Trainer], None]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        limits = self.fit_loop  # fast_dev_run may have changed them
        self.fit_loop: FitLoop = FitLoop(self, limits, before_training=[partial(f, self) for f in before_training])
        self.fit_loop.epoch_loop = EpochLoop(self, limits, step_ended=[partial(f, self) for f in step_ended])
        self._logger_connector = LoggerConnector(self)
        self._signal_connector = NoSignals()

    @property
    def parameter_count(self) -> int:
        """Parameters of the unsharded model."""
        strategy = StrategyMixin.find(self)
        if strategy is not None:
            return strategy.parameter_count
        return sum(param.numel() for param in self.lightning_module.parameters())
