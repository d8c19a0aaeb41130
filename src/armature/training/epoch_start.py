"""Make hooks of the start of training and of an epoch harmless after a resume inside an epoch.

`on_train_epoch_start` sets attributes for the epoch (a loss weight, a curriculum) that no checkpoint holds, so it is
called again. `on_train_start` is called by Lightning at each start. What both change of what the checkpoint holds
(weights, optimizers, schedules, saved attributes) is undone: the checkpoint has it as it was inside the epoch.
"""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from armature.checkpoint import state
from armature.errors import error_line
from armature.parallel import randomness

log = logging.getLogger(__name__)

HOOK = "on_train_epoch_start"
_NOT_USERS = ("lightning.", "armature.", "pytorch_lightning.")  # they save what they need
_LARGE = 1_000_000  # elements


def users_hooks(trainer: Any, name: str) -> list[tuple[Any, Callable[[], Any]]]:
    """Return the hooks of a name that users wrote, with their owners, in the order in which Lightning calls them."""
    module = trainer.lightning_module
    found = [
        (callback, partial(getattr(callback, name), trainer, module))
        for callback in trainer.callbacks
        if _is_users(getattr(callback, name))
    ]
    return [*found, *([(module, getattr(module, name))] if _is_users(getattr(module, name)) else [])]


def _is_users(hook: Any) -> bool:
    return not f"{getattr(hook, '__module__', '')}.".startswith(_NOT_USERS)


def repeat(trainer: Any, saved: dict[int, set[str]]) -> None:
    """Call the users' `on_train_epoch_start` again, and undo what it changes of what the checkpoint holds.

    Args:
        saved: names of attributes that the checkpoint restored, by their owner's id (`RestoredAttributes`).
    """
    if not (hooks := users_hooks(trainer, HOOK)):
        return
    with _undone(trainer):
        for owner, hook in hooks:
            restored = {n: copy.deepcopy(vars(owner)[n]) for n in saved.get(id(owner), ()) if n in vars(owner)}
            try:
                hook()
            except Exception as error:
                log.warning(
                    "%s.%s failed when it was called again after the resume inside an epoch (%s). What it sets for "
                    "the epoch, and no checkpoint holds, is as it was at the start of the process.",
                    type(owner).__name__, HOOK, error_line(error),
                )  # fmt: skip
            for name, value in restored.items():
                setattr(owner, name, value)


@contextmanager
def _undone(trainer: Any) -> Iterator[None]:
    """Undo changes of optimizers, schedules, flags and the random state, and log nothing."""
    module, loggers = trainer.lightning_module, trainer.loggers
    flags, random_state = state.flags(module), randomness.capture()
    optimizers = [o for o in trainer.optimizers if isinstance(o, Optimizer)]
    before = [([dict(group) for group in o.param_groups], {p: dict(s) for p, s in o.state.items()}) for o in optimizers]
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    schedules = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    wrapped = [each for each in trainer.strategy._lightning_optimizers if each is not None]
    added = [each for each in (*optimizers, *wrapped) if "add_param_group" not in vars(each)]
    own_log = vars(module).get("log")
    for each in added:  # the checkpoint has the group already
        vars(each)["add_param_group"] = lambda group: None
    vars(module)["log"] = lambda *args, **kwargs: None
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            yield
    finally:
        trainer.loggers = loggers
        vars(module).pop("log")
        if own_log is not None:
            vars(module)["log"] = own_log
        for each in added:
            vars(each).pop("add_param_group")
        for optimizer, (groups, tensors) in zip(optimizers, before, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.clear()
                group.update(values)
            optimizer.state.clear()
            optimizer.state.update(tensors)
        for scheduler, schedule in zip(schedulers, schedules, strict=True):
            scheduler.load_state_dict(schedule)
        state.set_flags(module, flags)
        randomness.restore(random_state)


# ---------------------------------------------------------------- weights
def copy_weights(trainer: Any) -> dict[str, Tensor]:
    """Return copies of weights and saved buffers, if a user's hook may change them before the first batch."""
    if not any(users_hooks(trainer, name) for name in ("on_train_start", HOOK)):
        return {}
    return {name: value.detach().clone() for name, value in _weights(trainer.lightning_module).items()}


@torch.no_grad()
def put_back(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Undo what hooks have changed of weights since `copy_weights`."""
    for name, value in _weights(module).items() if weights else ():
        if name in weights and weights[name].shape == value.shape:
            value.detach().copy_(weights[name])


def _weights(module: nn.Module) -> dict[str, Tensor]:
    found = nn.Module.state_dict(module, keep_vars=True)  # also if the module has a state_dict of its own
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


# ---------------------------------------------------------------- modes
def in_eval(module: nn.Module) -> list[str]:
    """Return the names of the modules that are in eval mode."""
    return [name for name, part in module.named_modules() if not part.training]


def set_modes(module: nn.Module, evaluating: list[str]) -> None:
    """Set the mode of each module."""
    names = set(evaluating)
    for name, part in module.named_modules():
        part.training = name not in names


# ---------------------------------------------------------------- attributes that users save themselves
class RestoredAttributes:
    """Finds the attributes that owners of `on_train_epoch_start` restore from a checkpoint, such as counters.

    Made before a checkpoint is loaded; `find` is called after it.
    """

    def __init__(self, trainer: Any) -> None:
        self._before = [(owner, _digests(owner)) for owner in _owners_that_load(trainer)]

    def find(self) -> dict[int, set[str]]:
        return {
            id(owner): {name for name, digest in _digests(owner).items() if before.get(name) != digest}
            for owner, before in self._before
        }


def _owners_that_load(trainer: Any) -> list[Any]:
    """Return the owners of the hook that also load state of their own."""
    owners = [owner for owner, _ in users_hooks(trainer, HOOK)]
    return [
        owner
        for owner in owners
        if _is_users(owner.on_load_checkpoint)
        or (not isinstance(owner, nn.Module) and _is_users(owner.load_state_dict))
    ]


def _digests(owner: Any) -> dict[str, int]:
    found = {}
    not_users = vars(L.LightningModule()).keys() if isinstance(owner, nn.Module) else ()
    for name, value in vars(owner).items():
        if name in not_users or isinstance(value, nn.Module | L.Trainer | Optimizer):
            continue
        if isinstance(value, Tensor) and value.numel() > _LARGE:
            continue
        try:
            found[name] = hash(pickle.dumps(value))
        except Exception:
            log.debug("%s.%s cannot be compared", type(owner).__name__, name)
    return found
