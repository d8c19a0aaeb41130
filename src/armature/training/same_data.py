"""Held-out data must be the same on all ranks, which divide one order of samples, and hooks must
take their batches.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from armature.errors import ConfigError
from armature.training import hook_check
from armature.training.progress import data_of


class SameHeldOutData(L.Callback):
    """Refuse validation and test data that a data module divides among ranks itself, before they
    are used.

    A rank would measure its share of its share. Training data are compared when the loop asks for
    them, and what a sampler draws of them when an epoch begins.

    Args:
        tests: the run ends with a test, whose data and hooks are checked before training if that
            can be done.
    """

    def __init__(self, *, tests: bool) -> None:
        self.tests = tests

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.val_dataloaders is not None:  # the loop has asked, on all ranks
            _check(trainer, "val")
        data: Any = data_of(trainer)
        tests = (
            self.tests and trainer.limit_test_batches != 0 and is_overridden("test_step", pl_module)
        )
        if tests and hasattr(type(data), "check_test") and (loaders := data.check_test()):
            callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
            found = hook_check.all_loader_problems(
                pl_module, callbacks, stage="test", several=loaders > 1
            )
            if found:
                raise ConfigError(found)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not batch_idx and hasattr(type(data := data_of(trainer)), "check_draw"):
            data.check_draw()  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _check(trainer, "test")


def _check(trainer: L.Trainer, split: str) -> None:
    data: Any = data_of(trainer)
    if hasattr(type(data), "check_ranks_agree"):
        data.check_ranks_agree(split)
