"""Lightning's Trainer, with some of its habits changed that would break a promise of ours."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L

from armature.training import dispatch


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
    - it goes from hook to hook without what changes nothing (dispatch.py);
    - validation also runs after the last step, wherever in an epoch that is;
    - loggers get the number of optimizer steps that are done as the step, for training, validation and test alike.

    Attributes:
        parameter_count: parameters of the undivided model.
        before_training: called once, when everything is set up and restored and no batch was asked for yet; also where
            a resumed run has no step left.
        step_ended: called after each optimizer step, when every hook of its last micro-batch has run and its values are
            logged: what is saved here is all of the step. Validation, where it is due, comes next.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.before_training: list[Callable[[], None]] = []
        self.step_ended: list[Callable[[], None]] = []
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
        log_step = self._logger_connector.update_train_step_metrics

        def log_step_and_end_it() -> None:
            log_step()
            if self.fit_loop.epoch_loop._accumulated_batches_reached():
                for call in self.step_ended:
                    call()

        self._logger_connector.update_train_step_metrics = log_step_and_end_it
        set_up_data = self.fit_loop.setup_data

        def set_up_data_and_begin() -> None:
            set_up_data()
            # a checkpoint is of a step: the next validation is a whole one, not the rest of the one before
            self.fit_loop.epoch_loop.val_loop.restarting = False
            self.fit_loop.epoch_loop.val_loop.batch_progress.reset()
            work, self.before_training = self.before_training, []
            for call in work:
                call()

        self.fit_loop.setup_data = set_up_data_and_begin
        start_epoch = self.fit_loop.on_advance_start

        def start_epoch_as_it_was() -> None:
            strategy: Any = self.strategy
            strategy.random_state.restore()  # after on_train_start of everybody, which runs once a process
            start_epoch()

        self.fit_loop.on_advance_start = start_epoch_as_it_was

    def _run_stage(self) -> Any:
        with dispatch.shortened(self):
            return super()._run_stage()

    def validate_now(self) -> None:
        """The validation of a fit, outside of its loop over batches."""
        self.validating = True
        first_loop_iter = self._logger_connector._first_loop_iter
        self.fit_loop.epoch_loop.val_loop.run()
        self.training = True
        self._logger_connector._first_loop_iter = first_loop_iter

    @property
    def parameter_count(self) -> int:
        count = getattr(self.strategy, "parameter_count", None)
        return count if count is not None else sum(p.numel() for p in self.lightning_module.parameters())


def validates_now(trainer: L.Trainer) -> bool:
    """Whether Lightning validates after the batch that has just ended: the very question that it asks next."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
