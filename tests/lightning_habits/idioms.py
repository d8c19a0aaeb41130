"""Further modules and callbacks as users of Lightning write them: each once failed, or lies near one that did."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.regression import MeanAbsoluteError

from tests.lightning_habits.regression import Manual, Regressor


# ---------------------------------------------------------------- the length of an epoch
class LoaderLength(Regressor):
    """The length of the schedule, from the length of the data module's loader."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        steps = len(self.trainer.datamodule.train_dataloader())
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, steps_per_epoch=steps, epochs=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FromData(Regressor):
    """The mean and deviation of the inputs, from the data module, as buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("deviation", torch.ones(8))

    def setup(self, stage):
        if stage == "fit":
            x = torch.stack([x for x, _ in self.trainer.datamodule.train])
            self.mean.copy_(x.mean(0))
            self.deviation.copy_(x.std(0))

    def forward(self, x):
        return self.net((x - self.mean) / self.deviation)


# ---------------------------------------------------------------- schedules
class StepsTheSchedule(Regressor):
    """lr_scheduler_step, as schedules of timm need it."""

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch + 1)

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [{"scheduler": lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)}]


class Fractions(Manual):
    """Warm restarts by fractions of an epoch, in manual optimization, with clipping by torch."""

    def training_step(self, batch, batch_idx):
        opt, schedule = self.optimizers(), self.lr_schedulers()
        opt.zero_grad()
        loss = self.shared_step(batch, "train")
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        opt.step()
        schedule.step(self.current_epoch + (batch_idx + 1) / self.trainer.num_training_batches)

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)]


# ---------------------------------------------------------------- gradients
class ClipsItself(Regressor):
    """Clips by torch, and centers gradients, before the step."""

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        self.log("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        for p in self.parameters():
            if p.grad is not None and p.ndim > 1:
                p.grad -= p.grad.mean(dim=1, keepdim=True)


class OwnBackward(Regressor):
    """backward, optimizer_zero_grad and optimizer_step of its own."""

    def backward(self, loss):
        loss.backward()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.log("steps", float(self.trainer.global_step))


class Unfreezes(Regressor):
    """The first layer is frozen for an epoch; all parameters are in the optimizer from the start."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)


class Truncated(Manual):
    """Backpropagation through time in pieces, by hand: the hidden state is detached between them."""

    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt, hidden, losses = self.optimizers(), None, []
        for part in x.split(2, dim=1):
            out, hidden = self.net(part, hidden)
            loss = F.cross_entropy(self.head(out[:, -1]), y)
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            hidden = tuple(h.detach() for h in hidden)
            losses.append(loss.detach())
        self.log("mean", torch.stack(losses).mean(), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out, _ = self.net(x)
        self.log("val/loss", F.cross_entropy(self.head(out[:, -1]), y), sync_dist=True)


# ---------------------------------------------------------------- teachers and buffers
class Averaged(Regressor):
    """torch's AveragedModel beside the model, updated after each batch, validated in place of it."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.mse_loss(self.average(x), y), sync_dist=True)


class Dino(Regressor):
    """A center of all ranks' outputs, in a buffer that moves within the step; a normalized, frozen last layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 1))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(1, 4, bias=False))
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def shared_step(self, batch, stage):
        x, y = batch
        out = self.net(x)
        if stage == "train":
            mean = self.all_gather(out.detach().mean(0, keepdim=True)).reshape(-1, 1, 1).mean(0)
            self.center.mul_(0.9).add_(mean, alpha=0.1)
        loss = F.mse_loss(self.last(out - self.center).mean(1, keepdim=True), y)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_after_backward(self):
        if self.current_epoch < 1:
            for p in self.last.parameters():
                p.grad = None


# ---------------------------------------------------------------- logging
class Groups(L.LightningModule):
    """A collection with compute groups, a mean weighted by hand, metrics in a ModuleDict, logged at an epoch's end."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        scores = MetricCollection([MulticlassAccuracy(4), MulticlassPrecision(4), MulticlassRecall(4)])
        self.scores = nn.ModuleDict({"train_": scores.clone("train_"), "val_": scores.clone("val_")})
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.scores["train_"](logits, y)
        loss = F.cross_entropy(logits, y)
        self.mean(loss, weight=len(y))
        return {"loss": loss}

    def on_train_epoch_end(self):
        self.log_dict(self.scores["train_"].compute(), prog_bar=True)
        self.log("mean", self.mean.compute())
        self.scores["train_"].reset()
        self.mean.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.scores["val_"](self.net(x), y)
        self.log_dict(self.scores["val_"], on_step=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Printed(Regressor):
    """Values that rank 0 logs alone, a logger of the user's, every n-th batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % self.trainer.log_every_n_steps == 0:
            self.report(loss)
        self.log("alone", float(self.global_step), rank_zero_only=True)
        return loss

    @rank_zero_only
    def report(self, loss):
        for logger in self.loggers:
            logger.log_metrics({"reported": float(self.global_step)}, step=self.global_step)

    def on_train_start(self):
        self.print("starts")
        self.logger.log_hyperparams({"width": 16})

    def configure_callbacks(self):
        return [EarlyStopping("val/loss", patience=9, mode="max"), LearningRateMonitor("step")]


class Objects(Regressor):
    """A torchmetrics object that is logged in training, on_step and on_epoch, beside the loss."""

    def __init__(self):
        super().__init__()
        self.error = MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.error(out, y)
        self.log("error", self.error, on_step=True, on_epoch=True, prog_bar=True)
        return F.mse_loss(out, y)


# ---------------------------------------------------------------- batches
class Augments(Regressor):
    """on_after_batch_transfer changes training batches, on_before_batch_transfer all of them."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.clamp(-2, 2), y

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x.flip(1), y) if self.trainer.training else (x, y)


class Iterates(Regressor):
    """Lightning's dataloader_iter in place of the batch."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.shared_step(batch, "train")


class SometimesNone(Regressor):
    """No loss for some batches, on every rank at once."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.global_step % 4 == 2 and batch_idx % 4 == 2 else loss


class Lazy(Regressor):
    """Layers that take their input size from a batch that the constructor runs, as Lightning's page has it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1))
        self.example_input_array = torch.zeros(2, 8)
        self.net(self.example_input_array)


class NotYet(Regressor):
    """The same without that run."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1))


# ---------------------------------------------------------------- callbacks
class Snapshots(Callback):
    """The best weights in memory: a copy of the state dict, loaded again at the end of training."""

    def __init__(self):
        self.best, self.weights = float("inf"), None

    def on_validation_end(self, trainer, pl_module):
        value = float(trainer.callback_metrics["val/loss"])
        if value < self.best:
            self.best = value
            self.weights = {name: tensor.detach().clone() for name, tensor in pl_module.state_dict().items()}

    def on_fit_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.weights)

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state_dict):
        self.best = state_dict["best"]


class Reinitializes(Callback):
    """The last layer starts anew in the second epoch, its optimizer state too."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            with torch.no_grad():
                for p in pl_module.net[2].parameters():
                    p.fill_(0.1)
                    trainer.optimizers[0].state[p].clear()
