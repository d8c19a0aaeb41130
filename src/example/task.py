"""Classification of points, as a plain LightningModule with every step spelled out.

`armature.tasks.base.Task` does the same for any model; a task that derives from it needs its own
metrics only.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from armature.models.loss import IGNORED
from armature.optim.groups import parameter_groups
from example.model import ResidualMLP

Batch = dict[str, Tensor]


class PointClassification(L.LightningModule):
    """Logs the loss in nats per point, and accuracy: the share of points whose likeliest class is
    right.

    The configuration passes factories, so that nothing is built before the strategy is ready for
    it.
    """

    mean_over_targets = (
        True  # training_step returns a mean over batch["targets"], so each target weighs the same
    )

    def __init__(
        self,
        model: Callable[[], ResidualMLP],
        *,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        scheduler: Callable[..., LRScheduler],
    ) -> None:
        super().__init__()
        self.make_model, self.make_optimizer, self.make_scheduler = model, optimizer, scheduler
        self.model: Any = None

    @override
    def configure_model(self) -> None:
        if self.model is None:
            with torch.device(
                "meta"
            ):  # no memory yet: the strategy calls ResidualMLP.initialize_parameter
                self.model = self.make_model()

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer(parameter_groups(self.model))
        scheduler = self.make_scheduler(optimizer, total_steps=self.trainer.max_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, which `ResidualMLP.loss` computes."""
        return self.model(batch["inputs"], batch["targets"])

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log_metrics(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log_metrics(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return what scripts/predict.py writes of each point: a column for each entry."""
        probability, index = self.model(batch["inputs"]).float().softmax(dim=-1).max(dim=-1)
        return {"class": index, "probability": probability}

    def log_metrics(self, batch: Batch, split: str) -> None:
        """Log the means over the targets that count, of all batches and ranks together."""
        outputs, targets = self.model(batch["inputs"]), batch["targets"]
        counted = int((targets != IGNORED).sum())  # 0 in a batch of padding
        correct = (outputs.argmax(dim=-1) == targets).sum()
        metrics = {"loss": self.model.loss(outputs, targets), "accuracy": correct / max(1, counted)}
        self.log_dict(
            {f"{split}/{name}": value for name, value in metrics.items()},
            batch_size=counted,
            sync_dist=True,
        )
