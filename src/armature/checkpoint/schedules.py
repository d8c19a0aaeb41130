"""The state of learning rate schedules that hold others as attributes, as those with a warmup
before another do.

torch's `state_dict` of a schedule has all attributes, and so the objects of those that it holds,
which no checkpoint can hold. Saved is the state of each; loaded is into the objects that
`configure_optimizers` has made.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from armature.errors import ConfigError

HELD = "__schedule__"  # the only key of a dict that holds the state of a schedule


def state_of(scheduler: Any) -> dict[str, Any]:
    return without_objects(scheduler.state_dict())


def load(scheduler: Any, saved: Mapping[str, Any]) -> None:
    scheduler.load_state_dict(with_objects(scheduler, saved))


def without_objects(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {HELD: state_of(value)} if isinstance(value, LRScheduler) else value
        for name, value in state.items()
    }


def without_held(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state without those of schedules that it holds, as files in Lightning's form
    must have it: these begin anew where the file is loaded.
    """
    return {name: value for name, value in state.items() if not _is_held(value)}


def _is_held(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {HELD}


def with_objects(scheduler: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Load the states of the schedules that one holds, and return its own state with these objects.

    Raises:
        ConfigError: it does not hold them.
    """
    found = dict(saved)
    for name, value in saved.items():
        if not _is_held(value):
            continue
        own = getattr(scheduler, name, None)
        if not isinstance(own, LRScheduler):
            raise ConfigError(
                f"{type(scheduler).__name__}.{name} was a schedule when the checkpoint was saved, "
                f"and is {own!r} now. Resume with the schedule that the run began with."
            )
        load(own, value[HELD])
        found[name] = own
    return found
