"""Learning-rate schedules of torch and of users, and who steps them."""

import warnings

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from tests.lightning_habits.habit import MICRO, OWED, OWED_AT_END, ddp, fsdp
from tests.lightning_habits.regression import Regressor


class Plateau(Regressor):
    """On a metric of validation, at the end of each epoch."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val/loss"}


class Sequential(Regressor):
    """Warm-up per epoch, then cosine."""

    def configure_optimizers(self):
        optimizer, epochs = self.sgd(), self.trainer.max_epochs
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[1])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


class OwnWarmup(Regressor):
    """Lightning's recipe: the rate is set in optimizer_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            scale = min(1.0, float(self.trainer.global_step + 1) / 6)
            for group in optimizer.param_groups:
                group["lr"] = scale * self.hparams.lr


class Cyclic(Regressor):
    """A schedule that holds a function."""

    def configure_optimizers(self):
        optimizer, shrinks = self.sgd(), lambda x: 0.9**x
        cyclic = lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, scale_fn=shrinks)
        return [optimizer], [{"scheduler": cyclic, "interval": "step"}]


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


class FineSchedules(Regressor):
    """Three schedules of one optimizer, with intervals, frequencies and monitors of their own."""

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.8)
        warmup = lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (1 + 0.02 * s), lambda s: 0.99**s])
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max", factor=0.7)
        step = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.9, min_lr=[1e-3, 0])
        every = {"interval": "step", "frequency": 3, "monitor": "train/mse"}
        return [optimizer], [
            {"scheduler": warmup, "interval": "step", "frequency": 2, "name": "warm"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val/loss", "strict": True},
            {"scheduler": step, "reduce_on_plateau": True, **every},
        ]

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train/mse", loss, sync_dist=True)
        return loss


class Warmup(lr_scheduler.LRScheduler):
    """The widely copied warmup before another schedule, which it holds."""

    def __init__(self, optimizer, total, after_scheduler):
        self.total, self.after_scheduler, self.finished = total, after_scheduler, False
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch >= self.total:
            if not self.finished:
                self.after_scheduler.base_lrs = [*self.base_lrs]
                self.finished = True
            return self.after_scheduler.get_last_lr()
        return [base * (self.last_epoch + 1) / (self.total + 1) for base in self.base_lrs]

    def step(self, epoch=None):
        if self.finished:
            self.after_scheduler.step()
            self._last_lr = self.after_scheduler.get_last_lr()
            self.last_epoch += 1
        else:
            super().step(epoch)


class WarmsUp(Regressor):
    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = Warmup(optimizer, 3, lr_scheduler.CosineAnnealingLR(optimizer, T_max=12))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class LoaderLength(Regressor):
    """The length of the schedule, from the length of the data module's loader."""

    def configure_optimizers(self):
        optimizer, epochs = self.sgd(), self.trainer.max_epochs
        steps = len(self.trainer.datamodule.train_dataloader())
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, steps_per_epoch=steps, epochs=epochs)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


HABITS = [
    fsdp(OwnWarmup),
    ddp(Cyclic),
    ddp(Plateau, sample=True, resume=OWED_AT_END),
    fsdp(Sequential),
    fsdp(FineSchedules, sample=True, resume=OWED),
    ddp(WarmsUp),
    ddp(LoaderLength, MICRO),
    fsdp(Timm),
]
