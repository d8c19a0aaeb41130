"""End a validation that is stopped, so that the checkpoint of the stop holds the weights of training.

Averages of weights take the place of the weights when a validation starts and leave it when it ends. Hooks of the end
are called only where the same object has one of the start, since others (early stopping, a best value) would take a
part of the validation for all of it. The resumed run validates anew.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging

from armature.training import epoch_metrics, epoch_start

_START = ("on_validation_start", "on_validation_epoch_start")
_END = ("on_validation_epoch_end", "on_validation_end")


def end(trainer: Any) -> None:
    """Call the hooks of the end, and undo what they change besides tensors: attributes, metrics, optimizers.

    Called by all ranks, after the last hook of a batch.
    """
    starting = {id(owner) for name in _START for owner, _ in _hooks(trainer, name)}
    ending = [(owner, name, hook) for name in _END for owner, hook in _hooks(trainer, name) if id(owner) in starting]
    if not ending:
        return
    module, same = trainer.lightning_module, {"rank": 0, "saved_data_ranks": [0], "data_ranks": [0]}
    states = [epoch_metrics.metric_states(module)]
    with torch.no_grad(), epoch_start.undone(trainer), _plain_attributes_kept([owner for owner, *_ in ending]):
        epoch_start.call_all(
            ending,
            when="the run was stopped within a validation",
            then="If it puts weights back that were replaced for the validation, the checkpoint of this stop holds the "
            "replaced ones.",
        )
    epoch_metrics.restore_states(module, states, **same)


def _hooks(trainer: Any, name: str) -> list[tuple[Any, Callable[[], Any]]]:
    averaging = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
    found = [(each, partial(getattr(each, name), trainer, trainer.lightning_module)) for each in averaging]
    known = {id(each) for each in averaging}
    return [*found, *(each for each in epoch_start.users_hooks(trainer, name) if id(each[0]) not in known)]


@contextmanager
def _plain_attributes_kept(owners: list[Any]) -> Iterator[None]:
    """Undo changes of numbers but flags, texts, and lists and dicts of them, such as a best value or a history."""
    before = [(owner, name, value) for owner in owners for name, value in _plain_attributes(owner).items()]
    yield
    for owner, name, value in before:
        vars(owner)[name] = value


def _plain_attributes(owner: Any) -> dict[str, Any]:
    found = {}
    for name, value in vars(owner).items():
        if isinstance(value, bool):  # whether weights are replaced, which the hook of the end has changed
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        found[name] = copy.deepcopy(value)
    return found
