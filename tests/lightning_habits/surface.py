"""Hooks, logging and the Trainer's attributes, as modules of users call them."""

import math
from argparse import Namespace
from collections.abc import Callable, Iterable

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import lr_scheduler
from torchmetrics import (
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    RunningMean,
)
from torchmetrics.regression import MeanAbsoluteError, R2Score

from tests.lightning_habits.regression import Regressor


# ---------------------------------------------------------------- optimizers and schedules
class WarmupCosine(lr_scheduler.LRScheduler):
    """A schedule of one's own, with state."""

    def __init__(self, optimizer, warmup: int = 4, total: int = 18):
        self.warmup, self.total = warmup, total
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < self.warmup:
            return [base * (self.last_epoch + 1) / self.warmup for base in self.base_lrs]
        share = (self.last_epoch - self.warmup) / max(1, self.total - self.warmup)
        return [base * 0.5 * (1 + math.cos(math.pi * share)) for base in self.base_lrs]


class OwnSchedule(Regressor):
    def configure_optimizers(self):
        optimizer = self.sgd()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": WarmupCosine(optimizer), "interval": "step"},
        }


class TimmSchedule:
    """A schedule that is none of torch's: step(epoch, metric), state_dict."""

    def __init__(self, optimizer):
        self.optimizer, self.epoch = optimizer, 0

    def step(self, epoch, metric=None):
        self.epoch = epoch
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * 0.7**epoch

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Timm(Regressor):
    """As Lightning's page has it: lr_scheduler_step for a schedule that is not torch's."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [{"scheduler": TimmSchedule(optimizer), "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch + 1)


class ChainedSchedules(Regressor):
    def configure_optimizers(self):
        optimizer = self.sgd()
        parts = [
            lr_scheduler.ConstantLR(optimizer, 0.3, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
        return [optimizer], [
            {"scheduler": lr_scheduler.ChainedScheduler(parts), "interval": "step", "frequency": 2}
        ]


class TwoLambdas(Regressor):
    """A function per group."""

    def configure_optimizers(self):
        groups = [
            {"params": self.net[0].parameters()},
            {"params": self.net[2].parameters(), "lr": 0.01},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        schedule = lr_scheduler.LambdaLR(
            optimizer, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByClass(Regressor):
    """LightningCLI's way: a callable that makes the optimizer."""

    def __init__(self, make: Callable[[Iterable], torch.optim.Optimizer] = torch.optim.Adam):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


class ByInit(Regressor):
    """LightningCLI's older way: dicts of class_path and init_args."""

    def __init__(self, optimizer_init: dict | None = None, lr_scheduler_init: dict | None = None):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        from lightning.pytorch.cli import instantiate_class

        optimizer = instantiate_class(self.parameters(), self.hparams.optimizer_init)
        schedule = instantiate_class(optimizer, self.hparams.lr_scheduler_init)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class OwnZeroGrad(Regressor):
    """optimizer_zero_grad and backward are replaced."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss, *args, **kwargs):
        (0.5 * loss).backward(*args, **kwargs)


class OwnClipping(Regressor):
    """configure_gradient_clipping by epoch."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        value = 0.1 if self.current_epoch else 0.5
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


class OwnClippingByValue(Regressor):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.02)


class SkipsNaN(Regressor):
    """Gradients that are not finite are set to zero by the module, as many recipes have it."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            if p.grad is not None:
                torch.nan_to_num_(p.grad, nan=0.0, posinf=0.0, neginf=0.0)


class AddsGroup(Regressor):
    """A group of parameters is added to the optimizer in the second epoch."""

    def on_train_epoch_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        if self.current_epoch >= 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": self.net[0].parameters(), "lr": 0.01})

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.05, momentum=0.9)


class Unfreezes(Regressor):
    """Weights are frozen by hand for the first epoch; the optimizer has all from the start."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch >= 1)


class Alternates(Regressor):
    """Which weights are trained changes from batch to batch."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx % 2 == 0)


# ---------------------------------------------------------------- logging
class LogsEverywhere(Regressor):
    """self.log in the hooks of steps and epochs, with numbers of all kinds."""

    def on_train_epoch_start(self):
        self.log("epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch, batch_idx):
        self.log("batch_start", float(batch_idx))

    def on_before_zero_grad(self, optimizer):
        self.log("zero_grad", 0.5)

    def on_after_backward(self):
        self.log("backward", torch.tensor(3))

    def training_step(self, batch, batch_idx):
        self.log("numpy", float(np.float32(0.25)))
        self.log("flag", True)
        self.log("long", torch.tensor(batch_idx), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log_dict({"a": 1.0, "b": torch.tensor([2.0])})

    def on_validation_start(self):
        self.log("val_start", 1.0)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_batch", float(batch_idx), batch_size=len(batch[0]), sync_dist=True)


class Collections(Regressor):
    """A MetricCollection with compute groups, a metric per target in a ModuleList, MinMaxMetric, a
    running mean.
    """

    def __init__(self):
        super().__init__()
        self.collection = MetricCollection(
            [MeanSquaredError(), MeanAbsoluteError(), R2Score()], prefix="train/"
        )
        self.listed = nn.ModuleList([MeanMetric(), MeanMetric()])
        self.extremes = MinMaxMetric(MeanSquaredError())
        self.running = RunningMean(window=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.collection(out, y)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        loss = F.mse_loss(out, y)
        self.listed[batch_idx % 2].update(loss.detach())
        self.running(self.trainer.strategy.reduce(loss.detach()))
        self.log("running", self.running.compute())
        return loss

    def on_train_epoch_end(self):
        for i, metric in enumerate(self.listed):
            self.log(f"listed_{i}", metric.compute())
            metric.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.extremes.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log_dict({f"val/{k}": v for k, v in self.extremes.compute().items()})


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


class LocalValues(Regressor):
    """Values by rank, summed by hand: torch.distributed within logging, only if it is there."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        total = self.trainer.strategy.reduce(torch.tensor(float(len(batch[0]))), reduce_op="sum")
        self.log("total", total, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("one_rank", loss, rank_zero_only=True, on_step=False, on_epoch=True)
        return loss


class Printer(Regressor):
    """The logger, printing and the Trainer's attributes."""

    def on_fit_start(self):
        self.print("module on", self.device, self.dtype, self.global_rank, self.local_rank)
        assert self.logger is not None
        assert self.loggers
        self.logger.log_hyperparams({"width": 16})
        self.logger.log_metrics({"first": 1.0}, step=0)

    @rank_zero_only
    def show(self):
        assert self.trainer.is_global_zero

    def on_train_batch_end(self, outputs, batch, batch_idx):
        trainer = self.trainer
        self.show()
        assert trainer.num_training_batches == 6
        assert trainer.is_last_batch == (batch_idx == 5)
        assert float(outputs["loss"]) >= 0
        assert self.lr_schedulers() is None
        assert len(trainer.optimizers) == 1
        assert isinstance(trainer.logged_metrics, dict)
        assert isinstance(trainer.progress_bar_metrics, dict)
        self.log("lr_now", self.optimizers().param_groups[0]["lr"])
        self.log("done", float(trainer.global_step))
        self.log("world", float(trainer.world_size > 0))

    def on_validation_epoch_end(self):
        assert not self.trainer.sanity_checking
        assert self.trainer.num_val_batches
        self.log("val_epoch", float(self.trainer.current_epoch), prog_bar=True)

    def on_train_epoch_end(self):
        assert float(self.trainer.logged_metrics["val_epoch"]) == self.trainer.current_epoch
        assert self.trainer.progress_bar_metrics["val_epoch"] == self.trainer.current_epoch

    def on_train_end(self):
        assert (
            self.trainer.checkpoint_callback is None
            or self.trainer.checkpoint_callback.best_model_path is not None
        )
        assert self.trainer.early_stopping_callback is None
        assert self.trainer.log_dir is not None


# ---------------------------------------------------------------- the Trainer
class StopsItself(Regressor):
    """trainer.should_stop within training_step."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 13:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class StopsAfterValidation(Regressor):
    def on_validation_epoch_end(self):
        if self.trainer.current_epoch == 1:
            self.trainer.should_stop = True


class ReturnsNone(Regressor):
    """None from training_step on all ranks, now and then."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 1 else loss


class SkipsFirst(Regressor):
    """on_train_batch_start leaves out every second epoch from its first batch on."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 1 and batch_idx == 0 else None


class TwoModels(L.LightningModule):
    """Two models, a base class and a mixin: forward calls one of them by the phase."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        return self.a(x) + self.b(x.flip(1)) if self.training else self.a(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"log": None, "loss": F.mse_loss(self(x), y), "text": "a", "list": [1, 2]}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(self.parameters(), lr=1e-2)]


class LateModel(L.LightningModule):
    """configure_model of Lightning's page, with a ModuleList and hyperparameters from a
    Namespace.
    """

    def __init__(self, depth: int = 2):
        super().__init__()
        self.save_hyperparameters(Namespace(depth=depth, name="x"))
        self.layers = None

    def configure_model(self):
        if self.layers is None:
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(self.hparams.depth)])
            self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log(
            "train_mse",
            loss,
            prog_bar=True,
            logger=True,
            on_step=True,
            on_epoch=True,
            sync_dist=True,
        )
        return loss

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(params, lr=1e-2)


class ChecksSetup(Regressor):
    """All hooks around fit, in their order."""

    def __init__(self):
        super().__init__()
        self.order = []

    def prepare_data(self):
        self.order.append("prepare_data")

    def setup(self, stage):
        self.order.append("setup" if stage == "fit" else "other")

    def configure_model(self):
        self.order.append("configure_model")

    def on_fit_start(self):
        self.order.append("on_fit_start")

    def on_train_start(self):
        assert "setup" in self.order
        assert self.order.index("configure_model") < self.order.index("on_fit_start")
        self.order.append("on_train_start")

    def teardown(self, stage):
        self.order.append("teardown")


class EvalInTraining(Regressor):
    """Runs a part in eval mode from on_train_start on.

    Lightning keeps the modes of parts after validation.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def on_train_start(self):
        self.norm.eval()
        self.dropout.eval()

    def forward(self, x):
        return self.net(self.dropout(self.norm(x)))


class Stateful(Regressor):
    """A running value that decides the loss, in a plain attribute; kept by hooks of the
    checkpoint.
    """

    def __init__(self):
        super().__init__()
        self.running = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        value = self.trainer.strategy.reduce(loss.detach())
        self.running = value if self.running is None else 0.9 * self.running + 0.1 * value
        return loss / self.running.clamp(min=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["running"] = self.running

    def on_load_checkpoint(self, checkpoint):
        self.running = checkpoint["running"]
        assert checkpoint["global_step"] in (9, 10)  # several ranks agree on a stop one step later
        assert checkpoint["epoch"] in (1, 2)
        assert "callbacks" in checkpoint
        assert checkpoint["hyper_parameters"]["lr"] == 0.05
