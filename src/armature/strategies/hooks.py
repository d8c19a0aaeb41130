"""Call hooks as `lightning.pytorch.trainer.call` does, but only those that somebody overrides.

A training step has ten hooks. Lightning visits every callback for each of them, wraps each visit in
a context manager of the profiler, and writes to the module twice, which torch searches for
parameters. With a dozen callbacks that takes about 200 µs per step. These functions look up the
same hooks at the moment of the call and call them in the same order with the same arguments. If a
run is profiled or logs at DEBUG level, Lightning's own functions are used.
"""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call

# As they are defined: a hook that is replaced on one of these classes counts as overridden
_DEFAULTS: dict[type, dict[str, Any]] = {
    base: {name: getattr(base, name) for name in dir(base)}
    for base in (L.Callback, L.LightningModule, L.LightningDataModule, Strategy)
}
_CALLBACK_DEFAULTS = _DEFAULTS[L.Callback]
_EMPTY_HOOKS = (  # hooks that do nothing unless a module overrides them
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


def call_hooks(trainer: L.Trainer, name: str, *args: Any) -> Any:
    """Call a hook of every callback that overrides it, then the LightningModule's; return what the
    module returns.
    """
    if is_watched(trainer):
        call._call_callback_hooks(trainer, name, *args)
        return call._call_lightning_module_hook(trainer, name, *args)
    module, default = _module_of(trainer), _CALLBACK_DEFAULTS[name]
    state = module.__dict__
    # `self.log` asks which hook it is called in
    before, state["_current_fx_name"] = (state["_current_fx_name"], name)
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        hook = getattr(callback, name)
        if getattr(hook, "__func__", None) is not default and callable(hook):
            hook(trainer, module, *args)
    state["_current_fx_name"] = before
    if name in _EMPTY_HOOKS and not is_overridden(module, name, L.LightningModule):
        return None
    return _call(module, name, getattr(module, name), args)


def call_module(trainer: L.Trainer, name: str, *args: Any) -> Any:
    """Call a hook of the LightningModule and return its result."""
    if is_watched(trainer):
        return call._call_lightning_module_hook(trainer, name, *args)
    module = _module_of(trainer)
    return _call(module, name, getattr(module, name), args)


def call_strategy(trainer: L.Trainer, name: str, *args: Any) -> Any:
    """Call a method of the strategy as a hook and return its result."""
    if is_watched(trainer):
        return call._call_strategy_hook(trainer, name, *args)
    return _call(_module_of(trainer), name, getattr(trainer.strategy, name), args)


def is_overridden(instance: Any, name: str, base: type) -> bool:
    """Return whether an instance has another method than `base`, one of Lightning's classes."""
    method = getattr(instance, name, None)
    return getattr(method, "__func__", method) is not _DEFAULTS[base].get(name)


def _module_of(trainer: L.Trainer) -> L.LightningModule:
    module = trainer.strategy.lightning_module  # as trainer.lightning_module, two calls shorter
    assert module is not None
    return module


def is_watched(trainer: L.Trainer) -> bool:
    """Return whether a profiler or a log at DEBUG level sees each hook."""
    return not isinstance(trainer.profiler, PassThroughProfiler) or call.log.isEnabledFor(  # pyright: ignore[reportAttributeAccessIssue]
        logging.DEBUG
    )


def _call(module: L.LightningModule, name: str, hook: Any, args: tuple[Any, ...]) -> Any:
    if not callable(hook):
        return None
    state = module.__dict__
    before, state["_current_fx_name"] = state["_current_fx_name"], name
    output = hook(*args)
    state["_current_fx_name"] = before
    return output
