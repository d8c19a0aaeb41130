"""Where schedules end: torch's own keep, after a resume, the lengths with which the first start
built them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L

from armature.parallel import process_group

log = logging.getLogger(__name__)

_LENGTHS = ("T_max", "T_0", "total_steps", "total_iters", "step_size", "milestones")
# of a schedule's state at a resume: where it is, and its lengths, of which `check` tells
KEPT = (
    "last_epoch", "_step_count", "_last_lr", "_schedule_phases",
    *_LENGTHS, *(f"_{name}" for name in _LENGTHS),
)  # fmt: skip
_REMEDY = (
    "Resume with what the run began with (trainer.max_steps, trainer.max_epochs or the schedule's "
    "own arguments), or "
    "begin another run with its weights: python scripts/convert.py RUN x.ckpt, then run.name=NEW "
    "resume=x.ckpt."
)
Lengths = list[tuple[Any, dict[str, Any]]]


def lengths_of(trainer: L.Trainer) -> Lengths:
    """Return each schedule's configuration with its lengths: those it was built with, before its
    state is loaded.
    """
    return [
        (config, _found(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs
    ]


def check(trainer: L.Trainer, built: Lengths) -> None:
    """Warn on rank 0 of lengths of the checkpoint that took the place of those that
    `configure_optimizers` has set.
    """
    for config, lengths in built:
        scheduler, kept = config.scheduler, _found(config.scheduler.state_dict())
        for name in (name for name, value in lengths.items() if kept.get(name, value) != value):
            kind = type(scheduler).__name__
            what = (
                f"{kind} was built with {name}={lengths[name]}, and the checkpoint has {kept[name]}"
            )
            if process_group.rank() == 0:
                log.warning(
                    "%s, which it keeps: the learning rates are not those of the new length. %s",
                    what,
                    _REMEDY,
                )


def _found(state: Any, within: str = "") -> dict[str, Any]:
    """Return the lengths in a scheduler's state and, by place, in those of the schedulers that it
    consists of.
    """
    if not isinstance(state, dict):
        return {}
    found = {
        f"{within}{name.removeprefix('_')}": state[name]
        for name in (*_LENGTHS, "_milestones")
        if name in state
    }
    for place, inner in enumerate(state.get("_schedulers") or ()):
        found |= _found(inner, f"{within}{place}.")
    return {
        name: sorted(value) if isinstance(value, Mapping) else value
        for name, value in found.items()
    }
