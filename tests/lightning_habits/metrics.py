"""What is logged, and torchmetrics' objects."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, MetricTracker
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from tests.lightning_habits.habit import INSIDE, MICRO, SAVED, ddp, fsdp
from tests.lightning_habits.regression import Regressor


class MetricsNet(L.LightningModule):
    """A MetricCollection that is cloned per split; values by on_step and on_epoch together."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
        metrics = MetricCollection({"acc": MulticlassAccuracy(4), "f1": MulticlassF1Score(4)})
        self.train_metrics = metrics.clone(prefix="train_")
        self.valid_metrics = metrics.clone(prefix="val_")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.train_metrics.update(logits, y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.log("my_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.valid_metrics.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log_dict(self.valid_metrics.compute())
        self.valid_metrics.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


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


class Reductions(Regressor):
    """reduce_fx, on_step and on_epoch, and outputs that another hook logs."""

    def training_step(self, batch, batch_idx):
        loss, x = super().training_step(batch, batch_idx), batch[0]
        epoch = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("largest", x.max(), reduce_fx="max", **epoch)
        self.log("smallest", x.min(), reduce_fx=torch.min, **epoch)
        self.log("count", float(len(x)), reduce_fx="sum", **epoch)
        self.log("mine", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mine_local", loss)
        if batch_idx % 3 == 1:
            self.log("rare", loss, **epoch)
        return {"loss": loss, "extra": x.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("extra_mean", outputs["extra"].mean(), sync_dist=True)


class Tracked(Regressor):
    """A MetricTracker over epochs."""

    def __init__(self):
        super().__init__()
        self.tracker = MetricTracker(MeanSquaredError(), maximize=False)

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.tracker.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log("val/loss", self.tracker.compute())
        self.log("val/best", self.tracker.best_metric())


class LogsEverywhere(Regressor):
    """self.log in the hooks of steps and epochs, with numbers of all kinds."""

    def on_train_batch_start(self, batch, batch_idx):
        self.log("batch_start", batch_idx)

    def on_after_backward(self):
        self.log("backward", torch.tensor(3))

    def on_before_zero_grad(self, optimizer):
        self.log("zero_grad", True)

    def on_train_epoch_end(self):
        self.log_dict({"a": 1.0, "b": torch.tensor([2.0])})

    def on_validation_start(self):
        self.log("val_start", 1.0)


class MetricUpdatedByData(Regressor):
    """A metric object that some ranks update, computed by hand at the end of the epoch."""

    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        if (x[:, 0] > 1.0).any():
            self.metric.update(x[x[:, 0] > 1.0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("metric", self.metric.compute())
        self.metric.reset()


class GradNorms(Regressor):
    """Lightning's utility, per parameter, before each step."""

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))


class GathersInValidation(Regressor):
    """all_gather of a dict at the end of the validation; the strategy's broadcast and barrier."""

    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append((self(batch[0]) - batch[1])[:, 0])

    def on_validation_epoch_end(self):
        gathered = self.all_gather({"error": torch.cat(self.seen)})["error"].flatten()
        self.trainer.strategy.barrier()
        self.log("val/worst", self.trainer.strategy.broadcast(float(gathered.abs().max())))
        self.log("val/loss", gathered.square().mean())
        if self.trainer.is_global_zero:
            self.log("val/count", float(len(gathered)), rank_zero_only=True)


class LogsAtStart(Regressor):
    """Values that only the start of the training, of an epoch or an epoch's first batch logs."""

    def on_train_start(self):
        self.log("start", float(self.trainer.global_step + 1), reduce_fx="sum")
        self.log_dict({"net/depth": 2.0, "net/width": 16.0})
        self.logger.log_metrics({"direct": 1.0}, step=0)

    def on_train_epoch_start(self):
        self.log("began", float(self.current_epoch), reduce_fx="max")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class ReadsMetrics(Regressor):
    """What was logged in the validation and the step before decides the loss."""

    def training_step(self, batch, batch_idx):
        loss, trainer = super().training_step(batch, batch_idx), self.trainer
        self.log("rate", 0.5 + 0.1 * self.global_step)
        kinds = trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics
        for known in kinds:
            loss = loss * (2 + known.get("val/loss", 0.0) + known.get("rate", 0.0))
        return loss


HABITS = [
    fsdp(Tracked, resume=SAVED),
    fsdp(MetricsNet, MICRO, data="images", apart=("my_loss_step",)),
    ddp(ListStates, data="images", apart=("train/mean_step",), sample=True),
    ddp(Reductions, apart=("mine_local",), sample=True),
    fsdp(MetricUpdatedByData, twice=True),
    fsdp(GradNorms),
    ddp(LogsEverywhere),
    ddp(LogsAtStart, resume=INSIDE, stop=12),
    # each rank's own values are in the loss
    fsdp(ReadsMetrics, random=True, resume=INSIDE),
    fsdp(GathersInValidation, sample=True),
]
