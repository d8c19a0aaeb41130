"""Lightning's Trainer, with some of its habits changed that would break a promise of ours."""

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Timer


class _NoSignals:
    """Stands in for Lightning's signal handling, which enters collectives inside a handler and can wait for ever."""

    received_sigterm = False

    def register_signal_handlers(self) -> None:
        """Nothing: callbacks/stop.py has the handlers."""

    def teardown(self) -> None:
        """Nothing to restore."""


class Trainer(L.Trainer):
    """Lightning's Trainer, but:

    - its signal handlers, and the broadcast of their flag before every batch, are replaced by callbacks/stop.py;
    - validation also runs after the last step, wherever in an epoch that is;
    - loggers get the number of optimiser steps that are done as the step, for training, validation and test alike.

    Attributes:
        parameter_count: parameters of the undivided model.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._signal_connector = _NoSignals()
        self.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        validation_is_due = self.fit_loop.epoch_loop._should_check_val_fx

        def due_now_or_at_the_end(data_fetcher: Any) -> bool:
            at_the_end = self.global_step >= self.max_steps and self.fit_loop.epoch_loop._accumulated_batches_reached()
            return validation_is_due(data_fetcher) or (at_the_end and self.enable_validation)

        self.fit_loop.epoch_loop._should_check_val_fx = due_now_or_at_the_end
        log_metrics = self._logger_connector.log_metrics

        def log_at_global_step(metrics: dict[str, Any], step: int | None = None) -> None:
            log_metrics(metrics, step=self.global_step if step is None and "step" not in metrics else step)

        self._logger_connector.log_metrics = log_at_global_step

    @property
    def parameter_count(self) -> int:
        count = getattr(self.strategy, "parameter_count", None)
        return count if count is not None else sum(p.numel() for p in self.lightning_module.parameters())

    @property
    def ran_out_of_time(self) -> bool:
        timers = [c for c in self.callbacks if isinstance(c, Timer)]  # pyright: ignore[reportAttributeAccessIssue]
        return any((timer.time_remaining() or 1.0) <= 0 for timer in timers if timer._duration is not None)
