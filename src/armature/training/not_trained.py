"""Warn of training that changes no weight: nothing else would tell."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

log = logging.getLogger(__name__)

BATCHES = 100  # global batches after which a manual optimization should have made a step


class NotTrained:
    """Watches the first steps of a run."""

    def __init__(self) -> None:
        self._stepped = False

    def begin(self, trainer: Trainer) -> None:
        """Learn of the optimizers' own steps.

        Lightning counts those alone that a module makes by its wrappers.
        """
        for optimizer in trainer.optimizers:
            if (
                isinstance(optimizer, Optimizer)
                and not trainer.lightning_module.automatic_optimization
            ):
                optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def look(self, trainer: Trainer, rows: Sequence[Mapping[str, Any]]) -> None:
        """Warn, once in a run, of a first gradient of 0, or of manual optimization without an
        optimizer's step.

        Args:
            rows: of steps, read from the device: `step`, and `train/loss` and `train/grad_norm` if
                there are any.
        """
        module, first, last = trainer.lightning_module, rows[0], rows[-1]
        if not trainer.is_global_zero or not trainer.optimizers:
            return
        name = type(module).__name__
        if module.automatic_optimization:
            if first["step"] == 1 and first.get("train/grad_norm") == 0.0 and "train/loss" in first:
                log.warning(
                    "%s: the gradient of the first step is 0. Either the loss does not depend on "
                    "any weight that is "
                    "trained, or all of them are at a point where it does not change.",
                    name,
                )
            return
        due = min(BATCHES, trainer.max_steps) if trainer.max_steps > 0 else BATCHES
        if first["step"] <= due <= last["step"] and not self._stepped and trainer.global_step == 0:
            log.warning(
                "%s: no optimizer has made a step in %d global batches. With "
                "automatic_optimization = False, "
                "training_step calls step() of what self.optimizers() returns.",
                name,
                last["step"],
            )
