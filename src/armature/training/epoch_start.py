"""Make hooks of the start of training and of an epoch harmless after a resume inside an epoch.

`on_train_epoch_start` sets attributes for the epoch (a loss weight, a curriculum) that no
checkpoint holds, so it is called again. `on_fit_start` and `on_train_start` are called by Lightning
at each start. What they change of what the checkpoint holds (weights, optimizers, schedules, saved
attributes) is undone: the checkpoint has it as it was inside the epoch.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from armature.checkpoint import optimizers as saved_optimizers
from armature.checkpoint import plain, schedules, state, whole_optimizers
from armature.checkpoint.of_ranks import NOT_USERS
from armature.errors import error_line
from armature.parallel import randomness
from armature.parallel.gradients import local_part
from armature.training import epoch_metrics
from armature.training.progress import data_of

log = logging.getLogger(__name__)

HOOK = "on_train_epoch_start"
_HAVE_NO_STATE = (
    "lightning.pytorch.core.",
    "lightning.pytorch.callbacks.callback.",
    "torch.",
    "armature.",
)
_NOT_OF_HOOKS = {  # entries of a checkpoint that no `on_save_checkpoint` has added
    "epoch", "global_step", "loops", "callbacks", "state_dict", "optimizer_states", "lr_schedulers",
    *plain.HYPER_PARAMETERS,
}  # fmt: skip
_LARGE = 4_000_000  # bytes of an attribute: larger ones are not compared

# objects, and the names of their attributes that a checkpoint has restored
Saved = list[tuple[Any, set[str]]]


def users_hooks(trainer: Any, name: str) -> list[tuple[Any, Callable[[], Any]]]:
    """Return the hooks of a name that users wrote, with their owners, in the order in which
    Lightning calls them.
    """
    module = trainer.lightning_module
    found = [
        (callback, partial(getattr(callback, name), trainer, module))
        for callback in trainer.callbacks
        if _is_users(getattr(callback, name))
    ]
    return [
        *found,
        *([(module, getattr(module, name))] if _is_users(getattr(module, name)) else []),
    ]


def _is_users(hook: Any) -> bool:
    # they save what they need
    return not f"{getattr(hook, '__module__', '')}.".startswith(NOT_USERS)


def random_state(trainer: Any) -> dict[str, Any] | None:
    """Return this rank's random state if a user's hook may draw from it at an epoch's start."""
    return randomness.capture() if users_hooks(trainer, HOOK) else None


def repeat(trainer: Any, saved: Saved, drawn_from: dict[str, Any] | None = None) -> None:
    """Call the users' `on_train_epoch_start` again, and undo what it changes of what the checkpoint
    holds.

    Args:
        drawn_from: the random state when the hook was called first; None: the current one.
    """
    if not (hooks := users_hooks(trainer, HOOK)):
        return
    with undone(trainer), _kept(saved):
        if drawn_from is not None:
            randomness.restore(drawn_from)
        call_all(
            [(owner, HOOK, hook) for owner, hook in hooks],
            when="it was called again after the resume inside an epoch",
            then="What it sets for the epoch, and no checkpoint holds, is as it was at the start "
            "of the process.",
        )


def call_all(hooks: Iterable[tuple[Any, str, Callable[[], Any]]], *, when: str, then: str) -> None:
    """Call users' hooks, given with their owners and names.

    One that fails is reported, and the others are called.

    Args:
        when, then: at what it failed and what follows from it, for the report.
    """
    for owner, name, hook in hooks:
        try:
            hook()
        except Exception as error:
            log.warning(
                "%s.%s failed when %s (%s). %s",
                type(owner).__name__,
                name,
                when,
                error_line(error),
                then,
            )


@contextmanager
def undone(trainer: Any) -> Iterator[None]:
    """Undo changes of optimizers, schedules, flags and the random state, and log nothing."""
    module, loggers = trainer.lightning_module, trainer.loggers
    flags, drawn = state.flags(module), randomness.capture()
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with (
            warnings.catch_warnings(),
            epoch_metrics.without_logging(module, *trainer.callbacks),
            optimizers_undone(trainer),
        ):
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            yield
    finally:
        trainer.loggers = loggers
        state.set_flags(module, flags)
        randomness.restore(drawn)


@contextmanager
def optimizers_undone(trainer: Any) -> Iterator[None]:
    """Undo changes of optimizers and schedules. Those that are replaced pass on what they hold."""
    optimizers = [o for o in trainer.optimizers if isinstance(o, Optimizer)]
    before = [([dict(group) for group in o.param_groups], _state_of(o)) for o in optimizers]
    names = state.parameter_names(trainer.lightning_module) if optimizers else {}
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    schedule_states = [copy.deepcopy(schedules.state_of(scheduler)) for scheduler in schedulers]
    wrapped = [each for each in trainer.strategy._lightning_optimizers if each is not None]
    added = [each for each in (*optimizers, *wrapped) if "add_param_group" not in vars(each)]
    for each in added:  # the checkpoint has the group already
        vars(each)["add_param_group"] = lambda group: None
    try:
        yield
    finally:
        for each in added:
            vars(each).pop("add_param_group")
        for optimizer, (groups, tensors) in zip(optimizers, before, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.clear()
                group.update(values)
            optimizer.state.clear()
            optimizer.state.update(tensors)
        _pass_on(trainer, optimizers, names)
        for config, schedule in zip(trainer.lr_scheduler_configs, schedule_states, strict=False):
            schedules.load(config.scheduler, schedule)


def _pass_on(trainer: Any, optimizers: list[Optimizer], names: dict[Tensor, str]) -> None:
    """Give optimizers that a hook has put into the places of others what those hold, by parameter
    name.

    Args:
        names: of the parameters before: the hook may have replaced these, too.
    """
    if all(one is other for one, other in zip(optimizers, trainer.optimizers, strict=False)):
        return
    now = state.parameter_names(trainer.lightning_module)
    for one, other in zip(optimizers, trainer.optimizers, strict=False):
        if one is other:
            continue
        if type(one) is not type(other) or whole_optimizers.is_saved_whole(one):
            log.warning(
                "trainer.optimizers: the %s that a hook has put into the place of %s begins anew "
                "with this resume, "
                "which is not exact. Return all optimizers from configure_optimizers.",
                type(other).__name__, type(one).__name__,
            )  # fmt: skip
            continue
        entries = {names[param]: entry for param, entry in one.state.items() if param in names}
        own = {param for group in other.param_groups for param in group["params"]}
        other.state.clear()
        other.state.update(
            {p: entries[name] for p, name in now.items() if p in own and name in entries}
        )
        saved = saved_optimizers.param_groups(one, saved_optimizers.group_names(one, names))
        saved_optimizers.restore_groups(other, saved_optimizers.group_names(other, now), saved)


def _state_of(optimizer: Optimizer) -> dict[Any, Any]:
    return {
        key: dict(entry) if isinstance(entry, dict) else entry
        for key, entry in optimizer.state.items()
    }


# ---------------------------------------------------------------- weights
def copy_weights(trainer: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of weights and saved buffers, if users have a hook of these names, which may
    change them.

    This rank's parts, on the CPU: a GPU that holds the model may have no room for it twice.
    """
    if not any(users_hooks(trainer, name) for name in names):
        return {}
    weights = _weights(trainer.lightning_module).items()
    return {name: local_part(value.detach()).to("cpu", copy=True) for name, value in weights}


@torch.no_grad()
def put_back(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Undo what hooks have changed of weights since `copy_weights`."""
    for name, value in _weights(module).items() if weights else ():
        part = local_part(value.detach())
        if name in weights and weights[name].shape == part.shape:
            part.copy_(weights[name])


def _weights(module: nn.Module) -> dict[str, Tensor]:
    # also if the module has a state_dict of its own
    found = nn.Module.state_dict(module, keep_vars=True)
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


# ---------------------------------------------------------------- attributes that users save
# themselves
class SavedAttributes:
    """Finds the attributes that code of users restores from a checkpoint, such as counters.

    Made when a checkpoint has been read; `find` is called when everything has loaded its state. An
    attribute counts if its value has changed in between, or is that of an entry of its name in the
    checkpoint.
    """

    def __init__(self, trainer: Any, checkpoint: Mapping[str, Any]) -> None:
        self._before = [
            (owner, _digests(owner), _entries(trainer, owner, checkpoint))
            for owner in _owners_that_load(trainer)
        ]

    def find(self) -> Saved:
        return [
            (
                owner,
                {name for name, digest in _digests(owner).items() if before.get(name) != digest}
                | {
                    name
                    for name, value in vars(owner).items()
                    if name in entries and _equal(value, entries[name])
                },
            )
            for owner, before, entries in self._before
        ]


def _owners_that_load(trainer: Any) -> list[Any]:
    """Return the module, callbacks and data module that load state of their own."""
    data = data_of(trainer)
    behind = getattr(data, "module", None)  # a PlainData's
    owners = [
        trainer.lightning_module,
        *trainer.callbacks,
        behind if isinstance(behind, L.LightningDataModule) else data,
    ]
    return [
        owner
        for owner in owners
        for hooks in [
            [getattr(owner, name, None) for name in ("on_load_checkpoint", "load_state_dict")]
        ]
        if any(
            hook and not f"{getattr(hook, '__module__', '')}.".startswith(_HAVE_NO_STATE)
            for hook in hooks
        )
    ]


def _entries(trainer: Any, owner: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that an object may have put into a checkpoint, by name; also from dicts
    among them.
    """
    if isinstance(owner, L.LightningDataModule):
        found = [checkpoint.get(type(data_of(trainer)).__qualname__)]
    else:
        found = [{key: value for key, value in checkpoint.items() if not _is_ours(key)}]
        if isinstance(owner, L.Callback):
            found.append(checkpoint.get("callbacks", {}).get(owner.state_key))
    found = [each for each in found if isinstance(each, dict)]
    inner = [value for each in found for value in each.values() if isinstance(value, dict)]
    return {key: value for each in (*inner, *found) for key, value in each.items()}


def _is_ours(key: Any) -> bool:
    return key in _NOT_OF_HOOKS or str(key).startswith(state.RESERVED)


def _equal(value: Any, saved: Any) -> bool:
    try:
        if isinstance(value, Tensor | np.ndarray):
            return torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(saved).cpu())
        return bool(plain.plain(value) == plain.plain(saved))
    except Exception:
        return False


@contextmanager
def _kept(saved: Saved) -> Iterator[None]:
    """Undo changes of attributes. What has not changed stays the same object."""
    before = []
    for owner, name in (
        (owner, name) for owner, names in saved for name in names if name in vars(owner)
    ):
        value = vars(owner)[name]
        try:
            before.append((owner, name, copy.deepcopy(value), _digest(value)))
        except Exception:
            log.debug("%s.%s cannot be copied", type(owner).__name__, name)
    yield
    for owner, name, value, digest in before:
        if digest is None or _digest(vars(owner).get(name)) != digest:
            setattr(owner, name, value)


def _digests(owner: Any) -> dict[str, bytes]:
    not_users = vars(L.LightningModule()).keys() if isinstance(owner, nn.Module) else ()
    found = {name: _digest(value) for name, value in vars(owner).items() if name not in not_users}
    return {name: digest for name, digest in found.items() if digest is not None}


def _digest(value: Any) -> bytes | None:
    """Return a digest of a value; None if it is large, or cannot be pickled."""
    file = _Digest()
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:
        return None
    return file.hash.digest()


class _Digest:
    """A file that keeps a digest of what is written, and refuses more than `_LARGE` bytes."""

    def __init__(self) -> None:
        self.hash, self.left = hashlib.sha256(), _LARGE

    def write(self, data: Any) -> None:
        self.left -= memoryview(data).nbytes
        if self.left < 0:
            raise ValueError("large")
        self.hash.update(data)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> None:
        """Raise ValueError for what would pickle a whole model, or copy much memory."""
        large = isinstance(obj, Tensor | np.ndarray) and obj.nbytes > _LARGE
        if large or isinstance(obj, nn.Module | L.Trainer | Optimizer | MethodType):
            raise ValueError("not a value")

    def reducer_override(self, obj: Any) -> Any:
        """Take this rank's part of a sharded tensor, which refuses to be pickled."""
        part = local_part(obj) if isinstance(obj, Tensor) else obj
        return NotImplemented if part is obj else part.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
