"""End a validation that is stopped, so that the checkpoint of the stop holds the state of training.

Averages of weights take the place of the weights when a validation starts and leave it when it
ends. Hooks of the end are called only where the same object has one of the start, since others
(early stopping, a best value) would take a part of the validation for all of it. The resumed run
validates anew, from the state that `Before` has kept.
"""

from typing import Any

import torch

from armature.parallel import randomness
from armature.training import epoch_metrics, epoch_start, user_state

_START = ("on_validation_start", "on_validation_epoch_start")
_END = ("on_validation_epoch_end", "on_validation_end")


class Before:
    """What a validation may change and a checkpoint may hold, but weights, as it is before: a stop
    goes back to it.

    The random state, buffers, the states of metric objects, and attributes of users' objects.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.drawn = trainer, randomness.capture()
        self.metrics = epoch_metrics.metric_states(trainer.lightning_module)
        # on the CPU: a GPU that holds the model may have no room for an average of its weights
        # twice
        self.attributes = user_state.snapshot(trainer)

    def put_back(self) -> None:
        """Called by all ranks, after the last hook of a batch."""
        _end(self.trainer)
        epoch_metrics.restore_states(self.trainer.lightning_module, [self.metrics])
        user_state.put_back(self.trainer, self.attributes)
        randomness.restore(self.drawn)


def _end(trainer: Any) -> None:
    """Call the hooks of the end."""
    starting = {id(owner) for owner, _ in epoch_start.users_hooks(trainer, *_START)}
    ending = [
        (owner, name, hook)
        for name in _END
        for owner, hook in epoch_start.users_hooks(trainer, name)
        if id(owner) in starting
    ]
    if not ending:
        return
    with torch.no_grad(), epoch_start.silent(trainer):
        epoch_start.call_all(
            ending,
            when="the run was stopped within a validation",
            then="If it puts weights back that were replaced for the validation, the checkpoint of "
            "this stop holds the replaced ones.",
        )
