"""Convolutions, transformers and segmentation, with torchmetrics."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryJaccardIndex,
    MulticlassAccuracy,
    MulticlassF1Score,
)
from torchmetrics.classification.accuracy import Accuracy


class SimpleNet(nn.Module):
    """lightning-hydra-template's SimpleDenseNet, small."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.model(x.view(x.size(0), -1))


class MNISTLitModule(L.LightningModule):
    """lightning-hydra-template's module: seven torchmetrics objects, ReduceLROnPlateau."""

    def __init__(
        self, model=SimpleNet, optimizer=None, scheduler=None, compile: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["model", "optimizer", "scheduler"])
        self.net = SimpleNet()
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=4)
        self.val_acc = Accuracy(task="multiclass", num_classes=4)
        self.test_acc = Accuracy(task="multiclass", num_classes=4)
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch, batch_idx) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx) -> None:
        loss, preds, targets = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(preds, targets)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(params=self.trainer.model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="min", factor=0.1, patience=0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": "val/loss",
                "interval": "epoch",
                "frequency": 1,
            },
        }


class SavedFactories(MNISTLitModule):
    """As the template has it: the network and the factories become hyperparameters."""

    def __init__(self, model, optimizer, scheduler, compile: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


class UNet(L.LightningModule):
    """BatchNorm, skip connection, IoU, OneCycleLR, outputs as a dict."""

    def __init__(self, width: int = 4, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 1, 8, 8)
        self.train_iou, self.val_iou = BinaryJaccardIndex(), BinaryJaccardIndex()

    def configure_model(self):
        if hasattr(self, "down"):
            return
        width = self.hparams.width
        self.down = self.block(1, width)
        self.middle = self.block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Sequential(self.block(2 * width, width), nn.Conv2d(width, 1, 1))

    def block(self, inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    def forward(self, x):
        skip = self.down(x)
        x = self.up(self.middle(F.max_pool2d(skip, 2)))
        return self.last(torch.cat([x, skip], dim=1))[:, 0]

    def training_step(self, batch, batch_idx):
        logits = self(batch["image"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["mask"].float())
        self.train_iou(logits.sigmoid(), batch["mask"])
        self.log("train/iou", self.train_iou, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["logits"].shape == batch["mask"].shape

    def validation_step(self, batch, batch_idx):
        logits = self(batch["image"])
        self.val_iou.update(logits.sigmoid(), batch["mask"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["mask"].float())
        self.log("val/loss", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("val/iou", self.val_iou.compute())
        self.val_iou.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=total
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class MetricsNet(L.LightningModule):
    """A MetricCollection that is cloned per split; values by on_step and on_epoch together."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
        metrics = MetricCollection(
            {"acc": MulticlassAccuracy(4, average="micro"), "f1": MulticlassF1Score(4)}
        )
        self.train_metrics, self.valid_metrics = (
            metrics.clone(prefix="train_"),
            metrics.clone(prefix="val_"),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.train_metrics.update(logits, y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.log("my_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.valid_metrics.update(self.net(x), y)

    def on_validation_epoch_end(self):
        self.log_dict(self.valid_metrics.compute())
        self.valid_metrics.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ComputedByHand(MetricsNet):
    """Updates in the step, computes and resets in on_train_epoch_end, as torchmetrics' page has
    it.
    """

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.train_metrics.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()


class ViT(L.LightningModule):
    """Layer-wise decay, own clipping, own lr_scheduler_step, a transform after the transfer."""

    def __init__(self, width: int = 16, depth: int = 2, lr: float = 1e-3, decay: float = 0.75):
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        width, depth = self.hparams.width, self.hparams.depth
        self.model = nn.ModuleDict(
            {
                "patch": nn.Conv2d(1, width, 4, 4),
                "blocks": nn.ModuleList(
                    nn.TransformerEncoderLayer(
                        width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
                    )
                    for _ in range(depth)
                ),
                "head": nn.Linear(width, 4),
            }
        )
        self.pos = nn.Parameter(torch.zeros(1, 4, width))

    def forward(self, x):
        x = self.model["patch"](x).flatten(2).transpose(1, 2) + self.pos
        for block in self.model["blocks"]:
            x = block(x)
        return self.model["head"](x.mean(1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x - 0.25) / 0.5, y

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def configure_optimizers(self):
        blocks = list(self.model["blocks"])
        groups = [
            {
                "params": [self.pos, *self.model["patch"].parameters()],
                "lr": self.hparams.lr * self.hparams.decay**3,
            }
        ]
        for i, block in enumerate(blocks):
            scale = self.hparams.decay ** (len(blocks) - i)
            groups.append({"params": list(block.parameters()), "lr": self.hparams.lr * scale})
        groups.append({"params": list(self.model["head"].parameters()), "lr": self.hparams.lr})
        optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=14)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [warmup, cosine], milestones=[4]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Checkpointed(MetricsNet):
    """Gradient checkpointing within forward."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = checkpoint(self.net[:3], x, use_reentrant=False)
        loss = F.cross_entropy(self.net[3](hidden), y)
        self.train_metrics.update(self.net[3](hidden.detach()), y)
        return loss


class Normed(L.LightningModule):
    """Spectral norm, whose power iteration is a buffer, and weight norm.

    GroupNorm and an embedding of positions.
    """

    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 4, 3, padding=1))
        self.norm = nn.GroupNorm(2, 4)
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(64, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.a(x)))
        return self.head(F.relu(self.b(F.avg_pool2d(x, 2).flatten(1))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class ListStates(L.LightningModule):
    """Metrics whose state is a list of all predictions, logged as objects; a ModuleDict of metrics
    per split.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1))
        self.auroc = nn.ModuleDict({"train_": BinaryAUROC(), "val_": BinaryAUROC()})
        self.mean = MeanMetric()

    def shared_step(self, batch, stage):
        x, y = batch
        logits, target = self.net(x)[:, 0], y % 2
        loss = F.binary_cross_entropy_with_logits(logits, target.float())
        self.auroc[f"{stage}_"].update(logits.detach().sigmoid(), target)
        self.log(f"{stage}/auroc", self.auroc[f"{stage}_"], on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch, "train")
        self.mean(loss)
        self.log("train/mean", self.mean, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.shared_step(batch, "val"), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
