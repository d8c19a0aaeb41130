"""Lightning's loop over epochs, as `loops.py` is its loop over the batches of one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loops.fit_loop import RestartStage as EpochStage
from lightning.pytorch.loops.fit_loop import _FitLoop
from typing_extensions import override

from armature.errors import ConfigError
from armature.strategies.base import StrategyMixin
from armature.training.loops import EpochLoop
from armature.training.run_hooks import call
from armature.training.stop import agree


class FitLoop(_FitLoop):
    """Run the epochs."""

    epoch_loop: EpochLoop
    owes_epoch_end = False  # the run was stopped between its last step and the end of the epoch
    owes_schedules = False  # it was stopped behind a step whose schedules have not followed

    def __init__(self, trainer: L.Trainer, limits: _FitLoop) -> None:
        super().__init__(trainer, min_epochs=limits.min_epochs, max_epochs=limits.max_epochs)
        self._begun = False

    @property
    @override
    def done(self) -> bool:
        if self.owes_epoch_end:
            return False
        return self.epoch_loop.all_global_batches_are_done or super().done

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
        call(self.trainer, "training_begins")
        self._begun = False
        super().run()

    def _count_frequencies_in_global_batches(self) -> None:
        """Let the `frequency` of a step schedule count global batches if these limit the run, as
        `max_steps` does.

        Lightning counts micro-batches, so that the learning rate would depend on how a global batch
        is divided.
        """
        trainer = self.trainer
        limited = self.epoch_loop.max_global_batches is not None
        for config in trainer.lr_scheduler_configs if limited else ():
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches

    @override
    def _iteration_based_training(self) -> bool:
        # not `trainer.max_steps`, which also reports the limit of global batches
        return self.max_steps != -1

    @override
    def on_advance_start(self) -> None:
        first, self._begun = not self._begun, True
        if first:
            call(self.trainer, "first_batch_follows")
        # After a resume: the set-up, `on_train_start` of all callbacks included, must not advance
        # the random state
        StrategyMixin.of(self.trainer).random_state.restore()
        if first:
            call(self.trainer, "step_continues")
            # schedules that follow a metric step after everything that a step saves
            if self.owes_schedules:
                self.epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            self.owes_schedules = False
        super().on_advance_start()
        self._stop_together()

    @override
    def on_run_start(self) -> None:
        super().on_run_start()
        self._stop_together()

    @override
    def on_advance_end(self) -> None:
        self.owes_epoch_end = False
        super().on_advance_end()
        self._stop_together()

    @override
    def on_run_end(self) -> None:
        call(self.trainer, "training_ends")
        super().on_run_end()
        call(self.trainer, "training_ended")

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
