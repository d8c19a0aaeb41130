"""Lightning's loop over batches.

This file and `fit_loop.py` are the only places that know its loops' private parts.

`EpochLoop.advance` and `on_advance_end` are one training step, with every hook in Lightning's
order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.training_epoch_loop import RestartStage as BatchStage
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from armature.data.prefetch import TRANSFER_HOOKS
from armature.data.users_view import guard_steps
from armature.errors import ConfigError, NoEndOfData
from armature.strategies.base import StrategyMixin
from armature.strategies.hooks import (
    call_hooks,
    call_module,
    call_strategy,
    is_overridden,
    is_watched,
)
from armature.training import epoch_metrics, epoch_start, stopped_validation
from armature.training.progress import data_of
from armature.training.stop import StoppedBySignal, agree
from armature.training.timings import DataWait

FETCH = "[_TrainingEpochLoop].train_dataloader_next"  # the name in Lightning's profiles


class EpochLoop(_TrainingEpochLoop):
    """Run the steps of one epoch.

    Differences from Lightning: validation also runs after the last step of the run, wherever in an
    epoch that is;
    SIGTERM is handled by training/stop.py instead of a broadcast before each batch.

    Args:
        limits: Lightning's loop, whose limits this one takes over.
        max_global_batches: end the run after so many global batches; None: Lightning's limits
            alone.
        step_ended: called after each global batch, when every hook of its last micro-batch has run
            and its values are logged, before validation. A checkpoint saved here holds the whole
            step.
        validation_ended: called after each validation, when every hook of its end has run, the
            module's own too.

    Attributes:
        data_wait: measures how long the loader's `next` takes, if set.
    """

    def __init__(
        self, trainer: L.Trainer, limits: _FitLoop, *, max_global_batches: int | None = None,
        step_ended: list[Callable[[], None]], validation_ended: list[Callable[[], None]],
    ) -> None:  # fmt: skip
        super().__init__(trainer, min_steps=limits.min_steps, max_steps=limits.max_steps)
        guard_steps(self.val_loop)
        self._results = epoch_metrics.Results(training=True)
        self._own_max_steps = limits.max_steps  # a trial of Lightning's Tuner has another limit
        self.max_global_batches = max_global_batches
        self.step_ended, self.validation_ended = step_ended, validation_ended
        # unknown until a batch is trained or a checkpoint of ours is loaded
        self._completed_batches: int | None = None
        self.data_wait: DataWait | None = None
        self._in_eval: list[str] | None = None  # while it validates
        # the training_step whose arguments `_takes_index` describes
        self._step_function: Any = None
        self._takes_index = True
        # whether code of users may set trainer.should_stop on some ranks only

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on one micro-batch.

        Raises:
            StopIteration: at the end of the data, or if `on_train_batch_start` returns -1.
        """
        if self._only_validation_is_left(data_fetcher):
            return
        completed, fetched = self.completed_batches, next(data_fetcher)
        # whose end training_step may meet
        takes_iterator = isinstance(data_fetcher, _DataLoaderIterDataFetcher)
        with nullcontext() if takes_iterator else NoEndOfData("A hook or training_step"):
            skips_epoch = self._train_on(fetched, data_fetcher, completed=completed)
        if skips_epoch:
            raise StopIteration

    def _train_on(self, fetched: Any, data_fetcher: _DataFetcher, *, completed: int) -> bool:
        """Train on what was fetched; return whether the rest of the epoch is skipped."""
        trainer, progress, index = self.trainer, self.batch_progress, self.batch_idx + 1
        takes_iterator = isinstance(data_fetcher, _DataLoaderIterDataFetcher)

        # move to the device
        progress.is_last_batch = data_fetcher.done
        # training_step(dataloader_iter) moves its batches
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            batch, index = data_fetcher._batch, data_fetcher._batch_idx
        else:
            batch = self.move_to_device(fetched[0])
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)

        # forward, backward, optimizer step
        outputs, skips_epoch = None, False
        if batch is None and not takes_iterator:
            self._warning_cache.warn(
                "train_dataloader yielded None. If this was on purpose, ignore this warning..."
            )
        else:
            skips_epoch = call_hooks(trainer, "on_train_batch_start", batch, index) == -1
            call_strategy(trainer, "on_train_batch_start", batch, index)
            if skips_epoch:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                arguments = OrderedDict(any=fetched)
                if not takes_iterator:
                    arguments = self._build_kwargs(OrderedDict(), batch, index)
                with trainer.profiler.profile("run_training_batch"):  # pyright: ignore[reportAttributeAccessIssue]
                    if trainer.lightning_module.automatic_optimization:
                        outputs = self._optimize(trainer.optimizers[0], index, arguments)
                    else:
                        outputs = self.manual_optimization.run(arguments)
        progress.increment_processed()
        if not skips_epoch:
            self._completed_batches = completed + (not self._should_accumulate())

        # learning rates
        if (strategy := StrategyMixin.find(trainer)) is None or not strategy.skipped_step:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skips_epoch:
            data = data_of(trainer)
            if hasattr(type(data), "skip_epoch"):  # ours, which knows the position in the data
                data.skip_epoch()
                # val_every_n_steps counts global batches that are trained, as after a resume
                progress.total.ready -= (
                    1 + (progress.current.ready - 1) % trainer.accumulate_grad_batches
                )
            return True
        # training_step has fetched the batch
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            batch, index, progress.is_last_batch = (
                data_fetcher._batch,
                data_fetcher._batch_idx,
                data_fetcher.done,
            )

        # log
        call_hooks(trainer, "on_train_batch_end", outputs, batch, index)
        trainer._logger_connector.on_batch_end()
        progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

        # save and stop where due
        if self._accumulated_batches_reached():
            for function in self.step_ended:
                function()
        return False

    @override
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Validate where due; step the schedulers that follow a metric."""
        if self._should_check_val_fx(data_fetcher) and not self._skip_next_val:
            with NoEndOfData("A hook of validation"):
                self.validate()
        self._skip_next_val = False
        self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if not self._should_accumulate():
            self._batches_that_stepped += 1
        self._save_loggers_on_train_batch_end()

    def _optimize(
        self, optimizer: Optimizer, index: int, arguments: OrderedDict[str, Any]
    ) -> dict[str, Any]:
        """Run forward and backward, and the optimizer's step with the last micro-batch of a global
        batch.
        """
        trainer, strategy, epoch = self.trainer, self.trainer.strategy, self.trainer.current_epoch
        progress, accumulate = (
            self.automatic_optimization.optim_progress.optimizer,
            trainer.accumulate_grad_batches,
        )

        def forward() -> ClosureResult:
            output = call_strategy(trainer, "training_step", *arguments.values())
            strategy.post_training_step()
            if output is None and trainer.world_size > 1:
                raise (RuntimeError if StrategyMixin.find(trainer) is None else ConfigError)(
                    "Skipping the `training_step` by returning None in distributed training is not "
                    "supported. Return a "
                    "loss on every rank: 0 times the loss trains on nothing."
                )
            # spares a division by 1
            if accumulate == 1 and isinstance(output, Tensor) and output.requires_grad:
                return ClosureResult(output)
            return self.automatic_optimization.output_result_cls.from_training_step_output(
                output, accumulate
            )

        def zero_grad() -> None:
            progress.zero_grad.increment_ready()
            call_hooks(trainer, "on_before_zero_grad", optimizer)
            progress.zero_grad.increment_started()
            call_module(trainer, "optimizer_zero_grad", epoch, index, optimizer)
            progress.zero_grad.increment_completed()

        # with the hooks on_before_backward and on_after_backward
        def backward(loss: Tensor) -> None:
            call_strategy(trainer, "backward", loss, optimizer)

        # SWA updates BatchNorm's statistics
        no_gradients = self.automatic_optimization._skip_backward
        # with training_step(dataloader_iter), `index` is the batch's before
        first = self.batch_idx % accumulate == 0
        closure = Closure(
            forward,
            zero_grad_fn=zero_grad if first and not no_gradients else None,
            backward_fn=None if no_gradients else backward,
        )
        accumulates, module, ours = (
            self._should_accumulate(),
            trainer.lightning_module,
            StrategyMixin.find(trainer),
        )
        steps_before = ours.steps_made[optimizer] if ours is not None else 0
        if accumulates and not strategy.handles_gradient_accumulation:
            # gradients are reduced with the last micro-batch
            with _block_parallel_sync_behavior(strategy):
                closure()
        else:
            if not accumulates:
                progress.step.increment_ready()
            # calls the closure, then on_before_optimizer_step and configure_gradient_clipping, then
            # steps
            call_module(
                trainer, "optimizer_step", epoch, index, strategy._lightning_optimizers[0], closure
            )
            if not accumulates:
                progress.step.increment_completed()
        result = closure.consume_result()
        if (
            ours is not None
            and not accumulates
            and is_overridden(module, "optimizer_step", L.LightningModule)
        ):
            ours.leave_out_together(optimizer, steps_before)
        return {} if result.loss is None else result.asdict()

    def forward_again(self, batch: Any, index: int) -> Any:
        """Call training_step without the hooks around it, and return its output."""
        return self.trainer.strategy.training_step(
            *self._build_kwargs(OrderedDict(), batch, index).values()
        )

    # ------------------------------------------------------------ batches
    def move_to_device(self, batch: Any) -> Any:
        trainer, module = self.trainer, self.trainer.lightning_module
        strategy, datamodule = trainer.strategy, data_of(trainer)
        batch = trainer.precision_plugin.convert_input(batch)
        if type(batch) is dict and all(
            type(v) is Tensor and v.device == strategy.root_device for v in batch.values()
        ):
            owners = [(module, L.LightningModule)] + (
                [] if datamodule is None else [(datamodule, L.LightningDataModule)]
            )
            hooks_batch = any(
                is_overridden(owner, name, base)
                for owner, base in owners
                for name in TRANSFER_HOOKS
            )
            if not (
                hooks_batch
                or is_overridden(strategy, "batch_to_device", Strategy)
                or is_watched(trainer)
            ):
                return dict(
                    batch
                    # a step may change its batch, and a loader that is a list gives the same one
                    # again
                )
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    @override
    def _build_kwargs(
        self, kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int
    ) -> OrderedDict[str, Any]:
        """Inspect training_step only if it is another function than last time: that takes 33 µs."""
        step = self.trainer.lightning_module.training_step
        function = getattr(step, "__func__", step)
        if function is not self._step_function:
            self._step_function = function
            self._takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        kwargs["batch"] = batch
        if self._takes_index:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        with getattr(self.trainer.fit_loop, "asking_for_data", nullcontext)():
            super().on_run_start(data_fetcher)

    @override
    def _on_before_fetch(self) -> None:
        self.trainer.profiler.start(FETCH)  # pyright: ignore[reportAttributeAccessIssue]
        if self.data_wait is not None:
            self.data_wait.fetch_started()

    @override
    def _on_after_fetch(self) -> None:
        if self.data_wait is not None:
            self.data_wait.fetch_ended()
        self.trainer.profiler.stop(FETCH)  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        trainer, configs = self.trainer, self.trainer.lr_scheduler_configs
        if update_plateau_schedulers:  # they follow a metric
            if any(config.reduce_on_plateau for config in configs):
                super()._update_learning_rates(interval, update_plateau_schedulers)
            return
        batches = (self.batch_idx if interval == "step" else trainer.current_epoch) + 1
        for config in configs if trainer.lightning_module.automatic_optimization else ():
            if (
                not config.reduce_on_plateau
                and config.interval == interval
                and batches % config.frequency == 0
            ):
                self.scheduler_progress.increment_ready()
                call_module(trainer, "lr_scheduler_step", config.scheduler, None)
                self.scheduler_progress.increment_completed()

    @override
    def _should_accumulate(self) -> bool:
        return self.trainer.accumulate_grad_batches > 1 and super()._should_accumulate()

    # ------------------------------------------------------------ limits
    @property
    def completed_batches(self) -> int:
        """Global batches that were trained on, over all resumes.

        With automatic optimization they are the optimizer steps. Manual optimization makes any
        number of steps per batch.
        """
        return self.global_step if self._completed_batches is None else self._completed_batches

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
        return self.last_batch_is_done or self._num_ready_batches_reached()

    # ------------------------------------------------------------ validation
    @override
    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        trainer, every = self.trainer, self.trainer.val_check_batch
        steps_done = self.last_batch_is_done and self.max_steps == self._own_max_steps
        ended = self.all_global_batches_are_done or steps_done
        # None: by the clock. This spares most steps a look at the hooks
        if every and every != float("inf"):
            batches = (
                self.total_batch_idx if trainer.check_val_every_n_epoch is None else self.batch_idx
            )
            ends = ended or self.batch_progress.is_last_batch or trainer.should_stop
            if not ends and (batches + 1) % every:
                return False
        due = super()._should_check_val_fx(data_fetcher)
        return due or (
            ended and self._accumulated_batches_reached() and self.trainer.enable_validation
        )

    @property
    def validation_is_due(self) -> bool:
        """Whether validation follows the batch that has just ended."""
        data_fetcher = self.trainer.fit_loop._data_fetcher
        return data_fetcher is not None and self._should_check_val_fx(data_fetcher)

    def validate(self) -> None:
        """Run the validation of a fit."""
        trainer = self.trainer
        trainer.validating = True
        first_loop_iter = trainer._logger_connector._first_loop_iter
        self._in_eval = epoch_start.in_eval(trainer.lightning_module)
        if not self._should_accumulate():  # gradients are not needed during validation
            call_module(trainer, "on_validation_model_zero_grad")
        # a resumed validation starts anew, since its values are not saved
        self.val_loop.restarting = False
        before = stopped_validation.Before(trainer)
        try:
            self.val_loop.run()
        except StoppedBySignal:
            before.put_back()
            raise
        self._in_eval = None  # after an exception it stays: a checkpoint saved at a stop holds it
        for function in self.validation_ended:  # while `callback_metrics` are the validation's
            function()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first_loop_iter
        agree(trainer)

    @property
    def modules_in_eval(self) -> list[str]:
        """The names of the modules that training has in eval mode, also while it validates."""
        return (
            epoch_start.in_eval(self.trainer.lightning_module)
            if self._in_eval is None
            else self._in_eval
        )

    # ------------------------------------------------------------ resume
    @override
    def on_save_checkpoint(self) -> dict[str, Any]:
        own = (
            {}
            if self._completed_batches is None
            else {"completed_batches": self._completed_batches}
        )
        return super().on_save_checkpoint() | own

    @override
    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        # older checkpoints: as many as optimizer steps
        self._completed_batches = state_dict.get("completed_batches")

    def _only_validation_is_left(self, data_fetcher: _DataFetcher) -> bool:
        """Return whether a resumed epoch has no batch left; count a validation that had ended as
        done.
        """
        left = False
        if self.restarting and self._should_check_val_fx(data_fetcher):
            if self.val_loop.restarted_mid_evaluation:
                return True
            if self.restarted_on_last:
                self._skip_next_val = left = True
            else:
                self.val_loop.increment_progress_to_evaluation_end()
        if not left and self.val_loop.restarting:
            self.val_loop.restarting = False
        return left

    def restore_progress(self, *, step: int, batches: int, closing: bool) -> None:
        """Set the counters of a resumed run.

        Args:
            step: global batches completed.
            batches: micro-batches of this epoch that are done; all of them if `closing`.
            closing: no batch is left, only the end of the epoch.
        """
        mid_epoch = bool(batches) and not closing
        progress: Any = self.batch_progress
        # The loop takes a batch that is not completed for a save at the batch's end: it completes
        # it and continues
        for count, seen in (
            (progress.current, batches),
            (progress.total, step * self.trainer.accumulate_grad_batches),
        ):
            count.ready = count.started = count.processed = seen
            count.completed = seen - mid_epoch
        progress.is_last_batch = closing
        self._batches_that_stepped = step - mid_epoch  # the loop adds 1 then
        self.restarting = bool(batches)
        self._restart_stage = BatchStage.NONE
        if batches:
            self._restart_stage = (
                BatchStage.RESTARTED_ON_LAST if closing else BatchStage.RESTARTED_ON_TRAIN_BATCH_END
            )
        self.val_loop.restarting = False
        # nothing but the end of the epoch is left
        self.val_loop._has_run = closing or self.last_batch_is_done

    def close_epoch(self) -> None:
        """Forget that the run was resumed: at the end of a resumed epoch."""
        self.restarting = False
        self.reset_restart_stage()
