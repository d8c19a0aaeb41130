"""What users' hooks decide on one rank must hold on all: a rank that trains on would wait for the
others forever.

Ranks ask each other only if the users' code may decide such a thing, since that costs time in every
step.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch

from armature.checkpoint.of_ranks import NOT_USERS
from armature.errors import ConfigError
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin

HOOK = "on_train_batch_start"
FLAG = "should_stop"
FRAMEWORKS = (*NOT_USERS, "torch.", "torchmetrics.", "builtins.")  # whose code is not the users'


def skipped(module: Any, skips: bool, *, batch_idx: int) -> bool:
    """Return `skips`, whether the hook has returned -1, which leaves the epoch.

    Raises:
        ConfigError: ranks differ.
    """
    if (ranks := process_group.ranks()) == 1 or not _may_skip(getattr(module, HOOK)):
        return skips
    if _count(module.trainer, skips) in (0, ranks):
        return skips
    everyones = process_group.all_gather_object(skips)
    raise ConfigError(
        f"{type(module).__name__}.{HOOK} returns -1 on rank {everyones.index(True)} and not on "
        "rank "
        f"{everyones.index(False)} (batch {batch_idx}). All ranks must leave the epoch together: "
        "decide by what "
        "all of them know, such as trainer.strategy.reduce(value) or self.all_gather(value)."
    )


def _may_skip(hook: Any) -> bool:
    code = getattr(inspect.unwrap(getattr(hook, "__func__", hook)), "__code__", None)
    return code is None or _returns_a_value(code)


@cache
def _returns_a_value(code: CodeType) -> bool:
    """Return False if each `return` is plain or `return None`, as in Lightning's own hook."""
    steps = [*dis.get_instructions(code)]
    for before, step in zip([None, *steps], steps, strict=False):
        if step.opname == "RETURN_VALUE":
            plain = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            if not plain or step.is_jump_target:
                return True
        elif step.opname == "RETURN_CONST" and step.argval is not None:  # Python 3.12 and 3.13
            return True
    return False


def stop_together(trainer: Any) -> None:
    """Set `trainer.should_stop` on all ranks if it is set on any.

    Called by all ranks, equally often.
    """
    trainer.should_stop = _count(trainer, trainer.should_stop) > 0


def _count(trainer: Any, yes: bool) -> int:
    """Return the number of ranks that say yes.

    The CPUs communicate, unless Lightning has made the group.
    """
    device = "cpu" if StrategyMixin.find(trainer) is not None else trainer.strategy.root_device
    return int(process_group.all_sum(torch.tensor(int(yes), device=device)))


def may_stop(trainer: Any) -> bool:
    """Return whether there are several ranks, and code of users that mentions `should_stop`."""
    owners = (trainer.lightning_module, *trainer.callbacks) if process_group.ranks() > 1 else ()
    return any(FLAG in names for names in names_in_methods(owners).values())


def names_in_methods(owners: Iterable[Any]) -> dict[str, set[str]]:
    """Return what the methods of users' classes mention, as attributes, globals and the like, by
    the method's name.
    """
    found: dict[str, set[str]] = {}
    classes = {base for owner in owners for base in type(owner).__mro__}
    users = (base for base in classes if not f"{base.__module__}.".startswith(FRAMEWORKS))
    for name, value in ((name, value) for base in users for name, value in vars(base).items()):
        names = {each for code in _codes(value) for each in code.co_names}
        found[name] = found.get(name, set()) | names
    return found


def _codes(value: Any) -> Iterator[CodeType]:
    function = getattr(value, "__func__", getattr(value, "fget", value))
    waiting = [getattr(inspect.unwrap(function), "__code__", None)] if callable(function) else []
    while waiting:
        if isinstance(code := waiting.pop(), CodeType):
            yield code
            waiting += code.co_consts  # functions within
