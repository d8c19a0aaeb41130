"""End a validation that is stopped, so that the checkpoint of the stop holds the state of training.

Averages of weights take the place of the weights when a validation starts and leave it when it
ends. Hooks of the end are called only where the same object has one of the start, since others
(early stopping, a best value) would take a part of the validation for all of it. The resumed run
validates anew, from the state that `Before` has kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

from armature.parallel import randomness
from armature.parallel.gradients import local_part
from armature.training import epoch_metrics, epoch_start, user_state

_START = ("on_validation_start", "on_validation_epoch_start")
_END = ("on_validation_epoch_end", "on_validation_end")


class Before:
    """What a validation may change and a checkpoint may hold, but weights, as it is before: a stop
    goes back to it.

    The random state, buffers, the states of metric objects, and attributes of users' objects.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        module = trainer.lightning_module
        self.drawn, self.metrics = randomness.capture(), epoch_metrics.metric_states(module)
        # on the CPU: a GPU that holds the model may have no room for an average of its weights
        # twice
        self.buffers = {
            n: local_part(v.detach()).to("cpu", copy=True)
            for n, v in _saved_buffers(module).items()
        }
        self.attributes = user_state.snapshot(trainer)

    def put_back(self) -> None:
        """Called by all ranks, after the last hook of a batch."""
        _end(self.trainer)
        module = self.trainer.lightning_module
        now = _saved_buffers(module)
        with torch.no_grad():
            for name, value in self.buffers.items():
                here = local_part(now[name]) if name in now else None
                if here is not None and here.shape == value.shape and not here.is_inference():
                    here.copy_(value)
                else:  # the validation has made another one
                    owner, _, own = name.rpartition(".")
                    setattr(module.get_submodule(owner), own, value.to(module.device))
        epoch_metrics.restore_states(module, [self.metrics])
        user_state.put_back(self.trainer, self.attributes)
        randomness.restore(self.drawn)


def _saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return them without `state_dict`, whose hooks may gather or write what they like."""
    return {
        f"{path}.{name}".removeprefix("."): buffer
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def _end(trainer: Any) -> None:
    """Call the hooks of the end."""
    starting = {id(owner) for name in _START for owner, _ in _hooks(trainer, name)}
    ending = [
        (owner, name, hook)
        for name in _END
        for owner, hook in _hooks(trainer, name)
        if id(owner) in starting
    ]
    if not ending:
        return
    with torch.no_grad(), epoch_start.silent(trainer):
        epoch_start.call_all(
            ending,
            when="the run was stopped within a validation",
            then="If it puts weights back that were replaced for the validation, the checkpoint of "
            "this stop holds the "
            "replaced ones.",
        )


def _hooks(trainer: Any, name: str) -> list[tuple[Any, Callable[[], Any]]]:
    averaging = [each for each in trainer.callbacks if isinstance(each, WeightAveraging)]
    found = [
        (each, partial(getattr(each, name), trainer, trainer.lightning_module))
        for each in averaging
    ]
    known = {id(each) for each in averaging}
    return [
        *found,
        *(each for each in epoch_start.users_hooks(trainer, name) if id(each[0]) not in known),
    ]
