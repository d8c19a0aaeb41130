"""Held-out data must be the same on all ranks, which divide one order of samples."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from typing_extensions import override

from armature.training.progress import data_of


class SameHeldOutData(L.Callback):
    """Refuse validation and test data that a data module divides among ranks itself, before they are used.

    A rank would measure its share of its share. Training data are compared when the loop asks for them.
    """

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.val_dataloaders is not None:  # the loop has asked, on all ranks
            _check(trainer, "val")

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _check(trainer, "test")


def _check(trainer: L.Trainer, split: str) -> None:
    data: Any = data_of(trainer)
    if hasattr(type(data), "check_ranks_agree"):
        data.check_ranks_agree(split)
