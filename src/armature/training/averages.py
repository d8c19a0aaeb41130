"""Lightning's averages of weights judge the weights themselves until they begin."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from typing_extensions import override


class BeginAverages(Callback):
    """Let each `WeightAveraging` hold the weights until its first update.

    Lightning validates, saves and ends the training with the average, which holds the initial
    weights as long as it has no update: one that starts late would judge those.
    """

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            average = getattr(callback, "_average_model", None)
            if not isinstance(callback, WeightAveraging) or average is None:
                continue
            if not average.n_averaged:
                average.update_parameters(pl_module)
                average.n_averaged.zero_()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)

    @override
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.on_validation_start(trainer, pl_module)
