"""Lightning's loops over the batches of an epoch, and over epochs.

This file alone knows their private parts. A training step is Lightning's own `advance` and our
`on_advance_end`.
"""

import math
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from armature.errors import ConfigError, end_of_data
from armature.strategies.base import StrategyMixin
from armature.training import epoch_metrics, run_hooks, stopped_validation
from armature.training.progress import feed_of
from armature.training.stop import StoppedBySignal, agree
from armature.training.timings import DataWait


class ValidationLoop(_EvaluationLoop):
    """Lightning's validation of a fit, of which a stop leaves no trace."""

    # what a stop within the validation that runs goes back to
    before: stopped_validation.Before | None = None

    @override
    def run(self) -> list[Any]:
        if self.trainer.sanity_checking:  # of the simulator
            return super().run()
        # a resumed validation starts anew, since its values are not saved
        self.restarting = False
        self.before = stopped_validation.Before(self.trainer)
        try:
            values = super().run()
        except StoppedBySignal:
            self.before.put_back()
            self._results.clear()  # the objects it has logged are not reset
            raise
        # after an exception it stays: a checkpoint saved at a stop holds its modes
        self.before = None
        # while `callback_metrics` are the validation's
        run_hooks.call(self.trainer, "validation_ended")
        agree(self.trainer)
        return values


class EpochLoop(_TrainingEpochLoop):
    """Run the steps of one epoch.

    Differences from Lightning: validation also runs after the last step of the run, wherever in an
    epoch that is; SIGTERM is handled by training/stop.py instead of a broadcast before each batch.

    Args:
        limits: Lightning's loop, whose limits this one takes over.
        max_global_batches: end the run after so many global batches; None: Lightning's limits
            alone.

    Attributes:
        data_wait: measures how long the loader's `next` takes, if set.
    """

    def __init__(
        self, trainer: L.Trainer, limits: _FitLoop, *, max_global_batches: int | None
    ) -> None:
        super().__init__(trainer, min_steps=limits.min_steps, max_steps=limits.max_steps)
        self._results = epoch_metrics.Results(training=True)
        self.max_global_batches = max_global_batches
        self.data_wait: DataWait | None = None
        self.val_loop: ValidationLoop = ValidationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )

    @override
    def advance(self, data_fetcher: Any) -> None:
        """Train on one micro-batch, by Lightning's own code: move it to the device,
        `on_train_batch_start`, `training_step` and `backward` (with the last micro-batch of a
        global batch also the optimizer's step), schedules, `on_train_batch_end`, what was logged.

        Raises:
            StopIteration: at the end of the data, or if `on_train_batch_start` returns -1.
        """
        progress: Any = self.batch_progress
        fetched = progress.current.ready
        try:
            super().advance(data_fetcher)
        except StopIteration as error:
            # training_step(dataloader_iter) may meet the end of the data
            takes_iterator = is_param_in_hook_signature(
                self.trainer.lightning_module.training_step, "dataloader_iter", explicit=True
            )
            if progress.current.ready > fetched and not takes_iterator:
                if progress.current.started == progress.current.ready:
                    raise end_of_data("A hook or training_step") from error
                self._leave_epoch()
            raise

    def _leave_epoch(self) -> None:
        """Take the global batch for unseen in which `on_train_batch_start` has returned -1."""
        progress: Any = self.batch_progress
        fit_loop: Any = self.trainer.fit_loop
        if (feed := feed_of(self.trainer)) is None:
            return
        feed.samples_seen = (feed.samples_seen // feed.train_size + 1) * feed.train_size
        if fit_loop.epochs_follow and self.max_global_batches is not None:
            # as a resume would count them
            left = (self.max_global_batches - self.completed_batches) * feed.global_batch_size
            fit_loop.max_epochs = math.ceil((feed.samples_seen + left) / feed.train_size)
        # val_every_n_steps counts global batches that are trained, as after a resume
        before = (progress.current.ready - 1) % self.trainer.accumulate_grad_batches
        for name, done in (("ready", 1), ("started", 0), ("processed", 1), ("completed", 0)):
            setattr(progress.total, name, getattr(progress.total, name) - before - done)

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: training/stop.py handles signals, without a broadcast in each step."""

    @override
    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        left_out = StrategyMixin.of(self.trainer).skipped_step  # an overflow in fp16
        if not left_out or interval == "epoch" or update_plateau_schedulers:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        """Save and stop where due, when all hooks of the step have run; then validate, and step the
        schedules that follow a metric.
        """
        if self.batch_ends_step:
            run_hooks.call(self.trainer, "step_ended")
        super().on_advance_end(data_fetcher)

    @override
    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        if self.data_wait is not None:
            self.data_wait.fetch_started()

    @override
    def _on_after_fetch(self) -> None:
        if self.data_wait is not None:
            self.data_wait.fetch_ended()
        super()._on_after_fetch()

    @property
    def batch_ends_step(self) -> bool:
        """Whether the newest micro-batch is the last one of its global batch."""
        return (self.batch_idx + 1) % self.trainer.accumulate_grad_batches == 0

    # ------------------------------------------------------------ limits
    @property
    def completed_batches(self) -> int:
        """Global batches that were trained on, over all resumes.

        With automatic optimization they are the optimizer steps. Manual optimization makes any
        number of steps per batch.
        """
        module = self.trainer.lightning_module
        if module is None or module.automatic_optimization:
            return self.global_step
        progress: Any = self.batch_progress
        return progress.total.processed // self.trainer.accumulate_grad_batches

    @property
    def all_global_batches_are_done(self) -> bool:
        """Whether `max_global_batches` have been completed."""
        return (
            self.max_global_batches is not None
            and self.completed_batches >= self.max_global_batches
        )

    @property
    def last_batch_is_done(self) -> bool:
        """Whether the last global batch or optimizer step of the run has been completed."""
        return self.all_global_batches_are_done or 0 <= self.max_steps <= self.global_step

    @property
    @override
    def _is_training_done(self) -> bool:
        return self.all_global_batches_are_done or super()._is_training_done

    # ------------------------------------------------------------ validation
    @override
    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        trainer, every = self.trainer, self.trainer.val_check_batch
        ended = self.last_batch_is_done
        # None: by the clock. This spares most steps a look at the hooks
        if every:
            batches = (
                self.total_batch_idx if trainer.check_val_every_n_epoch is None else self.batch_idx
            )
            ends = ended or self.batch_progress.is_last_batch or trainer.should_stop
            if not ends and (batches + 1) % every:
                return False
        return super()._should_check_val_fx(data_fetcher) or (
            ended and self.batch_ends_step and trainer.enable_validation
        )

    @property
    def validation_is_due(self) -> bool:
        """Whether validation follows the batch that has just ended."""
        data_fetcher = self.trainer.fit_loop._data_fetcher
        return data_fetcher is not None and self._should_check_val_fx(data_fetcher)

    def validate(self) -> None:
        """Run the validation that a stop has left out, before the first batch."""
        self.trainer.validating = True
        self.trainer.lightning_module.on_validation_model_zero_grad()
        self.val_loop.run()
        self.trainer.training = True


class FitLoop(_FitLoop):
    """Run the epochs."""

    epoch_loop: EpochLoop
    owes_epoch_end = False  # the run was stopped between its last step and the end of the epoch
    owes_schedules = False  # it was stopped behind a step whose schedules have not followed
    closed = False  # the hooks of the run's end have run: a resume does not call them again
    epochs_follow = False  # trainer.max_steps alone ends the run: max_epochs is for modules to read

    def __init__(self, trainer: L.Trainer, limits: _FitLoop) -> None:
        super().__init__(trainer, min_epochs=limits.min_epochs, max_epochs=limits.max_epochs)

    @property
    @override
    def done(self) -> bool:
        if self.owes_epoch_end:
            return False
        return self.epoch_loop.all_global_batches_are_done or super().done

    @property
    @override
    def skip(self) -> bool:
        # a run that was killed before the hooks of its end still has to call them
        return self.closed if self.done else super().skip

    @override
    def run(self) -> None:
        module = self.trainer.lightning_module
        if module.automatic_optimization and not self.trainer.optimizers:
            raise ConfigError(
                f"{type(module).__name__}.configure_optimizers returned no optimizer. Return one; "
                "or, if training_step calls optimizers or none, set self.automatic_optimization = "
                "False in __init__."
            )
        self._count_frequencies_in_global_batches()
        # a module's configure_optimizers may have done it before, for the number of steps
        self.setup_data()
        run_hooks.call(self.trainer, "training_begins")
        self._begun = False
        super().run()

    def _count_frequencies_in_global_batches(self) -> None:
        """Let the `frequency` of a step schedule count global batches if these limit the run, as
        `max_steps` does.

        Lightning counts micro-batches, so that the learning rate would depend on how a global batch
        is divided.
        """
        if self.epoch_loop.max_global_batches is None:
            return
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= self.trainer.accumulate_grad_batches

    @override
    def _iteration_based_training(self) -> bool:
        # not `trainer.max_steps`, which also reports the limit of global batches
        return self.max_steps != -1

    @override
    def on_advance_start(self) -> None:
        first, self._begun = not self._begun, True
        if first:
            run_hooks.call(self.trainer, "first_batch_follows")
        # After a resume: the set-up, `on_train_start` of all callbacks included, must not advance
        # the random state
        StrategyMixin.of(self.trainer).random_state.restore()
        if first:
            run_hooks.call(self.trainer, "step_continues")
            # schedules that follow a metric step after everything that a step saves
            if self.owes_schedules:
                self.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            self.owes_schedules = False
        super().on_advance_start()
        agree(self.trainer)

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        agree(self.trainer)

    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        # not the loaders' empty states, which stock Lightning would want its own loaders to have
        return {}

    @override
    def on_advance_end(self) -> None:
        self.owes_epoch_end = False
        super().on_advance_end()
        agree(self.trainer)

    @override
    def on_run_end(self) -> None:
        run_hooks.call(self.trainer, "training_ends")
        super().on_run_end()
        run_hooks.call(self.trainer, "training_ended")

    def restore_progress(self, *, epoch: int, step: int, batches: int, closing: bool) -> None:
        """Set the counters of a resumed run.

        Args:
            epoch: epochs completed.
            step: global batches completed.
            batches: micro-batches of the next epoch that are done; all of them if `closing`.
            closing: no batch is left, only the end of the epoch.
        """
        loop, started = self.epoch_loop, bool(batches)
        epochs: Any = self.epoch_progress
        for count in (epochs.total, epochs.current):
            count.ready = count.started = epoch + started
            count.processed = count.completed = epoch
        mid_epoch = started and not closing
        progress: Any = loop.batch_progress
        # The loop takes a batch that is not completed for a save at the batch's end: it completes
        # it and continues
        for count, seen in (
            (progress.current, batches),
            (progress.total, step * self.trainer.accumulate_grad_batches),
        ):
            count.ready = count.started = count.processed = seen
            count.completed = seen - mid_epoch
        progress.is_last_batch = closing
        loop._batches_that_stepped = step - mid_epoch  # the loop adds 1 then
        # not by Lightning's setter, with which a limit of steps is always restarting
        self._restarting = loop.restarting = started
        loop.val_loop.restarting = False
        self.update_restart_stage()
        # else the schedulers that are due at the end of this epoch would be skipped
        self._restarting = False
        # nothing but the end of the epoch is left
        loop.val_loop._has_run = closing or loop.last_batch_is_done
        self._last_train_dl_reload_epoch = epoch
