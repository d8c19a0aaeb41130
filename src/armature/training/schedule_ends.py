"""Where schedules end: torch's own keep, after a resume, the lengths with which the first start built them."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as L
from torch.optim.lr_scheduler import OneCycleLR

from armature.errors import ConfigError
from armature.parallel import process_group

log = logging.getLogger(__name__)

_LENGTHS = ("T_max", "T_0", "total_steps", "total_iters", "step_size", "milestones")
_REMEDY = (
    "Resume with the trainer.max_steps and trainer.max_epochs of before, or begin another run with its weights: "
    "python scripts/convert.py RUN x.ckpt, then run.name=NEW resume=x.ckpt."
)
Lengths = list[tuple[Any, dict[str, Any]]]


def lengths_of(trainer: L.Trainer) -> Lengths:
    """Return each scheduler with its lengths: before the checkpoint's state is loaded, those it was built with."""
    return [(config.scheduler, _found(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs]


def check(built: Lengths) -> None:
    """Say on rank 0 which lengths of the checkpoint took the place of those that `configure_optimizers` has set.

    Raises:
        ConfigError: OneCycleLR, which takes no step after its last one, would end before the run does.
    """
    for scheduler, lengths in built:
        kept = _found(scheduler.state_dict())
        for name in (name for name, value in lengths.items() if kept.get(name, value) != value):
            kind = type(scheduler).__name__
            what = f"{kind} was built with {name}={lengths[name]}, and the checkpoint has {kept[name]}"
            if isinstance(scheduler, OneCycleLR) and kept[name] < lengths[name]:
                raise ConfigError(f"{what}, after which it takes no step. {_REMEDY}")
            if process_group.rank() == 0:
                log.warning("%s, which it keeps: the learning rates are not those of the new length. %s", what, _REMEDY)


def _found(state: Any, within: str = "") -> dict[str, Any]:
    """Return the lengths in a scheduler's state and, by place, in those of the schedulers that it consists of."""
    if not isinstance(state, dict):
        return {}
    found = {f"{within}{name}": state[name] for name in (*_LENGTHS, "_milestones") if name in state}
    for place, inner in enumerate(state.get("_schedulers") or ()):
        found |= _found(inner, f"{within}{place}.")
    return {name.replace("_milestones", "milestones"): value for name, value in found.items()}
