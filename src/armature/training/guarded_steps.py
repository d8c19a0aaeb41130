"""A StopIteration that a step of an evaluation raises ends the run with an error, not its data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L

from armature.errors import NoEndOfData


def guard_trainer(trainer: L.Trainer) -> None:
    """Guard the steps of a Trainer's evaluations and predictions."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        guard_steps(loop)


def guard_steps(loop: Any) -> None:
    name = "_predict_step" if hasattr(loop, "_predict_step") else "_evaluation_step"
    setattr(loop, name, partial(_guarded, getattr(loop, name)))  # a trainer can be pickled


def _guarded(
    step: Callable[..., None], batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
) -> None:
    takes_iterator = dataloader_iter is not None  # whose end the step may meet
    with (
        nullcontext()
        if takes_iterator
        else NoEndOfData("A hook or step of evaluation or prediction")
    ):
        step(batch, batch_idx, dataloader_idx, dataloader_iter)
