"""Lightning's loop over epochs, as `loops.py` is its loop over the batches of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loops.fit_loop import RestartStage as EpochStage
from lightning.pytorch.loops.fit_loop import _FitLoop
from typing_extensions import override

from armature.errors import ConfigError
from armature.strategies.base import StrategyMixin
from armature.training.loops import EpochLoop
from armature.training.stop import agree


class FitLoop(_FitLoop):
    """Run the epochs.

    Args:
        before_training: called once, when everything is set up and restored and no batch has been
            fetched; also if a resumed run has no step left.
    """

    epoch_loop: EpochLoop  # unless a user has put another one of Lightning's in its place
    owes_epoch_end = False  # the run was stopped between its last step and the end of the epoch

    def __init__(
        self, trainer: L.Trainer, limits: _FitLoop, *, before_training: list[Callable[[], None]]
    ) -> None:
        super().__init__(trainer, min_epochs=limits.min_epochs, max_epochs=limits.max_epochs)
        self._before_training = before_training
        # called once, after all `on_train_start` hooks
        self.before_first_batch: list[Callable[[], None]] = []
        # then: what a stop had left, such as the step's validation
        self.rest_of_step: list[Callable[[], None]] = []
        # called once, before ranks reduce the epoch's values
        self.before_epoch_end: list[Callable[[], None]] = []
        # called once, before all `on_train_end` hooks
        self.before_train_end: list[Callable[[], None]] = []
        # called once, after them, the module's own too
        self.after_train_end: list[Callable[[], None]] = []

    @property
    @override
    def done(self) -> bool:
        loop = self.epoch_loop
        if self.owes_epoch_end:
            return False
        return (isinstance(loop, EpochLoop) and loop.all_global_batches_are_done) or super().done

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
        if self._before_training:
            # a module's configure_optimizers may have done it before, for the number of steps
            self.setup_data()
            _call_once(self._before_training)
            if self.restarting and not self.epoch_loop.last_batch_is_done:
                # the end of a shorter run had ended its epoch, too; RestoreProgress counts epochs
                # anew
                progress: Any = self.epoch_progress
                progress.current.processed = 0
        super().run()

    def _count_frequencies_in_global_batches(self) -> None:
        """Let the `frequency` of a step schedule count global batches if these limit the run, as
        `max_steps` does.

        Lightning counts micro-batches, so that the learning rate would depend on how a global batch
        is divided.
        """
        trainer, loop = self.trainer, self.epoch_loop
        limited = isinstance(loop, EpochLoop) and loop.max_global_batches is not None
        for config in trainer.lr_scheduler_configs if limited else ():
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches

    @override
    def _iteration_based_training(self) -> bool:
        # not `trainer.max_steps`, which also reports the limit of global batches
        return self.max_steps != -1

    @override
    def on_advance_start(self) -> None:
        _call_once(self.before_first_batch)
        # After a resume: the set-up, `on_train_start` of all callbacks included, must not advance
        # the random state
        if (strategy := StrategyMixin.find(self.trainer)) is not None:
            strategy.random_state.restore()
        _call_once(self.rest_of_step)
        super().on_advance_start()
        self._stop_together()

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        self._stop_together()

    @override
    def on_advance_end(self) -> None:
        self.owes_epoch_end = False
        _call_once(self.before_epoch_end)
        super().on_advance_end()
        self._stop_together()

    @override
    def on_run_end(self) -> None:
        _call_once(self.before_train_end)
        super().on_run_end()
        _call_once(self.after_train_end)

    def _stop_together(self) -> None:
        """Let `trainer.should_stop`, which users' code may set on one rank, hold on all."""
        agree(self.trainer)

    def restore_progress(self, *, epoch: int, started: bool) -> None:
        """Set the counters of a resumed run: complete epochs, and whether some batches of the next
        one are done.
        """
        progress: Any = self.epoch_progress
        for count in (progress.total, progress.current):
            count.ready = count.started = epoch + started
            count.processed = count.completed = epoch
        self._restart_stage = EpochStage.RESTARTED_MID_EPOCH if started else EpochStage.NONE
        # else the schedulers that are due at the end of this epoch would be skipped
        self._restarting = False
        self._last_train_dl_reload_epoch = epoch


def _call_once(functions: list[Callable[[], None]]) -> None:
    """Call the functions, and empty their list before: what they add themselves is for the next
    time.
    """
    called = functions[:]
    functions.clear()
    for function in called:
        function()
