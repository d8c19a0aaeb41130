"""Lightning's way from hook to hook, without what changes nothing: of some 600 µs that its loop adds to a step, 200.

For each of the ten hooks of a batch Lightning visits every callback, also those that have nothing to do there. It wraps
each visit in a context manager of a profiler that does not profile, and in two assignments to the module, which torch
searches for parameters. It asks in each batch again how many arguments `training_step` takes, and who overrides the
hooks that move a batch. Here all of that is asked once. The same methods are called, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

FUNCTIONS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
IDLE = (  # hooks that do nothing unless a module overrides them
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@contextmanager
def shortened(trainer: L.Trainer) -> Iterator[None]:
    """While this Trainer trains. Other Trainers, and runs that are profiled or debugged, keep Lightning's own way."""
    if not isinstance(vars(trainer)["profiler"], PassThroughProfiler) or call.log.isEnabledFor(logging.DEBUG):
        yield
        return
    way = _Way(trainer)
    try:
        for name in FUNCTIONS:
            setattr(call, name, getattr(way, name))
        way.settle_batches()
        yield
    finally:
        way.undo()


class _Way:
    """Stands in for the functions of `lightning.pytorch.trainer.call`."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self._own: dict[str, Callable[..., Any]] = {name: getattr(call, name) for name in FUNCTIONS}
        self._callbacks: list[L.Callback] = []
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        module = trainer.lightning_module
        self._idle = {name for name in IDLE if not _overrides(module, name, L.LightningModule)}
        self._borrowed: list[tuple[Any, str]] = []

    def _call_callback_hooks(
        self, trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
    ) -> None:
        if trainer is not self.trainer or monitoring_callbacks is not None:
            kwargs["monitoring_callbacks"] = monitoring_callbacks
            self._own["_call_callback_hooks"](trainer, hook_name, *args, **kwargs)
            return
        if self._callbacks != trainer.callbacks:
            self._callbacks, self._hooks = list(trainer.callbacks), {}
        hooks = self._hooks.get(hook_name)
        if hooks is None:
            hooks = [getattr(c, hook_name) for c in self._callbacks if _overrides(c, hook_name, L.Callback)]
            self._hooks[hook_name] = hooks
        if not hooks:
            return
        module = trainer.lightning_module
        state = module.__dict__
        before, state["_current_fx_name"] = state["_current_fx_name"], hook_name
        for hook in hooks:
            hook(trainer, module, *args, **kwargs)
        state["_current_fx_name"] = before

    def _call_lightning_module_hook(
        self, trainer: Any, hook_name: str, *args: Any, pl_module: L.LightningModule | None = None, **kwargs: Any
    ) -> Any:
        if trainer is not self.trainer or pl_module is not None:
            kwargs["pl_module"] = pl_module
            return self._own["_call_lightning_module_hook"](trainer, hook_name, *args, **kwargs)
        if hook_name in self._idle:
            return None
        module = trainer.lightning_module
        return _called(module, hook_name, getattr(module, hook_name), args, kwargs)

    def _call_strategy_hook(self, trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        if trainer is not self.trainer:
            return self._own["_call_strategy_hook"](trainer, hook_name, *args, **kwargs)
        return _called(trainer.lightning_module, hook_name, getattr(trainer.strategy, hook_name), args, kwargs)

    def settle_batches(self) -> None:
        """What a batch goes through before the step, where nobody overrides it; and the arguments of the step."""
        trainer, module = self.trainer, self.trainer.lightning_module
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        datamodule: Any = getattr(trainer, "datamodule", None)
        moved_by_others = any(
            _overrides(module, name, L.LightningModule)
            or (datamodule is not None and _overrides(datamodule, name, L.LightningDataModule))
            for name in TRANSFER
        )
        if not moved_by_others and not _overrides(strategy, "batch_to_device", Strategy):

            def batch_to_device(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
                target = device or strategy.root_device
                if type(batch) is dict and all(type(v) is Tensor and v.device == target for v in batch.values()):
                    return batch
                return move_data_to_device(batch, target)

            self._lend(strategy, "batch_to_device", batch_to_device)
            self._lend(module, "_on_before_batch_transfer", lambda batch, dataloader_idx=0: batch)
        self._lend_results()
        self._lend_clipping()
        self._lend_validation()
        self._lend(loop.automatic_optimization, "output_result_cls", _Undivided)
        accumulates = loop._should_accumulate  # asked six times a batch
        self._lend(loop, "_should_accumulate", lambda: trainer.accumulate_grad_batches > 1 and accumulates())
        with_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

        def build_kwargs(kwargs: Any, batch: Any, batch_idx: int) -> Any:
            kwargs["batch"] = batch
            if with_index:
                kwargs["batch_idx"] = batch_idx
            return kwargs

        self._lend(loop, "_build_kwargs", build_kwargs)

    def _lend_results(self) -> None:
        """Nothing is collected in a batch of training while `self.log` has not been called."""
        trainer: Any = self.trainer
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        starts, ends = connector.on_batch_start, connector.on_batch_end

        def nothing_to_collect() -> bool:
            return not results and trainer.state.stage is RunningStage.TRAINING

        def on_batch_start(batch: Any, dataloader_idx: int | None = None) -> None:
            if nothing_to_collect():
                connector._first_loop_iter = connector._first_loop_iter is None
                results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx
            else:
                starts(batch, dataloader_idx)

        def on_batch_end() -> None:
            if nothing_to_collect():
                results.batch = results.batch_size = None
            else:
                ends()

        self._lend(connector, "on_batch_start", on_batch_start)
        self._lend(connector, "on_batch_end", on_batch_end)

    def _lend_validation(self) -> None:
        """Whether there is a validation at all does not change while training."""
        trainer: Any = self.trainer
        enabled, every = trainer.enable_validation, trainer.check_val_every_n_epoch
        self._lend(
            trainer.fit_loop.epoch_loop,
            "_should_check_val_epoch",
            lambda: enabled and (every is None or (trainer.current_epoch + 1) % every == 0),
        )

    def _lend_clipping(self) -> None:
        """Straight to the strategy, where the module has no clipping of its own."""
        trainer, module = self.trainer, self.trainer.lightning_module
        hooks = ("configure_gradient_clipping", "clip_gradients")
        if not module.automatic_optimization or any(_overrides(module, name, L.LightningModule) for name in hooks):
            return
        plugin: Any = trainer.precision_plugin
        algorithm = GradClipAlgorithmType(trainer.gradient_clip_algorithm or "norm")

        def clip(model: Any, optimizer: Any, clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            plugin.clip_gradients(optimizer, clip_val or 0.0, algorithm)

        self._lend(plugin, "_clip_gradients", clip)

    def _lend(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        if name not in vars(owner):
            owner.__dict__[name] = function
            self._borrowed.append((owner, name))

    def undo(self) -> None:
        for name, function in self._own.items():
            setattr(call, name, function)
        for owner, name in self._borrowed:
            vars(owner).pop(name, None)


class _Undivided(ClosureResult):
    """A loss that is its step's own: dividing it by 1 would add an operation to forward and to backward."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        if isinstance(training_step_output, Tensor) and normalize == 1:
            return cls(training_step_output)
        return super().from_training_step_output(training_step_output, normalize)


def _called(module: Any, hook_name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """`self.log` asks the module for the hook that it is called in."""
    state = module.__dict__
    before, state["_current_fx_name"] = state["_current_fx_name"], hook_name
    output = function(*args, **kwargs)
    state["_current_fx_name"] = before
    return output


def _overrides(instance: Any, name: str, base: type) -> bool:
    return name in vars(instance) or getattr(type(instance), name, None) is not getattr(base, name, None)
