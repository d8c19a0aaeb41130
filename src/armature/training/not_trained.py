"""Warn of training that changes no weight: nothing else would tell."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

BATCHES = 100  # global batches after which a manual optimization should have made a step


def warn(trainer: Trainer, rows: Sequence[Mapping[str, Any]]) -> None:
    """Warn, once in a run, of a first gradient of 0, or of manual optimization without an optimizer step.

    Args:
        rows: of steps, read from the device: `step`, and `train/grad_norm` if it is known.
    """
    module, first, last = trainer.lightning_module, rows[0]["step"], rows[-1]["step"]
    if not trainer.is_global_zero or not trainer.optimizers:
        return
    name = type(module).__name__
    if module.automatic_optimization:
        if first == 1 and rows[0].get("train/grad_norm") == 0.0:
            log.warning(
                "%s: the gradient of the first step is 0. Either the loss does not depend on any weight that is "
                "trained, or all of them are at a point where it does not change.",
                name,
            )
        return
    due = min(BATCHES, trainer.max_steps) if trainer.max_steps > 0 else BATCHES
    if first <= due <= last and trainer.global_step == 0:
        log.warning(
            "%s: no optimizer has made a step in %d global batches. With automatic_optimization = False, training_step "
            "calls step() of what self.optimizers() returns.",
            name,
            last,
        )
