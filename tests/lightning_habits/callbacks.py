"""Callbacks of Lightning and of users."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn

from tests.lightning_habits.habit import INSIDE, callback, ddp, fsdp, stock
from tests.lightning_habits.regression import Regressor


class Finetuned(Regressor):
    """A backbone that a callback freezes, and a head."""

    def __init__(self):
        super().__init__()
        self.net = None
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.backbone(x))

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class Unfreeze(BaseFinetuning):
    """Lightning's FeatureExtractorFreezeUnfreeze."""

    def __init__(self, unfreeze_at_epoch: int = 1):
        super().__init__()
        self._unfreeze_at_epoch = unfreeze_at_epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self._unfreeze_at_epoch:
            self.unfreeze_and_add_param_group(
                modules=pl_module.backbone, optimizer=optimizer, train_bn=True
            )


class CountsBatches(Callback):
    """State in state_dict, a value logged from a callback."""

    def __init__(self):
        self.state = {"batches": 0, "epochs": 0}

    @property
    def state_key(self):
        return "CountsBatches[mine]"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.state["batches"] += 1
        pl_module.log("counted", float(self.state["batches"]))
        trainer.logger.log_metrics({"direct": self.state["batches"]}, step=trainer.global_step)

    def on_train_epoch_end(self, trainer, pl_module):
        self.state["epochs"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state.update(state_dict)

    def state_dict(self):
        return self.state.copy()


class Probe(Callback):
    """Runs the module in eval mode within training, as callbacks that draw samples do."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 3 == 0:
            was = pl_module.training
            pl_module.eval()
            with torch.no_grad():
                value = pl_module(
                    torch.linspace(-1, 1, 16, device=pl_module.device).reshape(2, 8)
                ).mean()
            pl_module.train(was)
            pl_module.log("probe", value, rank_zero_only=False, sync_dist=True)


class OnlineEvaluator(Callback):
    """A probe with an optimizer of its own, as lightning-bolts' SSLOnlineEvaluator."""

    def on_fit_start(self, trainer, pl_module):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.probe = nn.Linear(8, 1).to(pl_module.device)
        self.optimizer = torch.optim.Adam(self.probe.parameters(), lr=1e-2)
        if getattr(self, "restored", None):
            self.probe.load_state_dict(self.restored["probe"])
            self.optimizer.load_state_dict(self.restored["optimizer"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.probe(x), y)
        loss.backward()
        for p in self.probe.parameters():
            p.grad = trainer.strategy.reduce(p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.log("probe_loss", loss.detach(), sync_dist=True)

    def state_dict(self):
        return {"probe": self.probe.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self.restored = state_dict


class AttachesProbe(Callback):
    """Gives the module another layer in setup, which its optimizer then has."""

    def setup(self, trainer, pl_module, stage):
        if not hasattr(pl_module, "probe"):
            with torch.random.fork_rng():
                torch.manual_seed(7)
                pl_module.probe = nn.Linear(8, 1)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert (
            pl_module.probe.weight.grad is None or torch.isfinite(pl_module.probe.weight.grad).all()
        )


class TrainsProbe(Regressor):
    def forward(self, x):
        return self.net(x) + self.probe(x)


class StepsPerSecond(Callback):
    """Reads the clock, and keeps best values by callback_metrics."""

    def __init__(self):
        self.best = float("inf")

    def on_validation_end(self, trainer, pl_module):
        self.best = min(self.best, float(trainer.callback_metrics["val/loss"]))

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("best", self.best)

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state_dict):
        self.best = state_dict["best"]


class GradientAccumulator(Callback):
    """Adds noise to gradients after each backward, and clips weights after each step: by callbacks
    alone.
    """

    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            if p.grad is not None:
                p.grad.add_(0.001 * p.grad.sign())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            for p in pl_module.parameters():
                p.mul_(0.999)


class KeepsBest(Callback):
    """Keeps the best weights in memory and puts them back at the end, as Keras does."""

    def __init__(self):
        self.best, self.weights = float("inf"), None

    def on_validation_end(self, trainer, pl_module):
        score = float(trainer.callback_metrics["val/loss"])
        if score < self.best:
            self.best = score
            self.weights = {
                name: value.detach().clone() for name, value in pl_module.state_dict().items()
            }

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.weights)

    def state_dict(self):
        return {"best": self.best, "weights": self.weights}

    def load_state_dict(self, state_dict):
        self.best, self.weights = state_dict["best"], state_dict["weights"]


class LowersRate(Callback):
    """Sets the learning rate of the optimizer at the start of an epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + trainer.current_epoch)


class ChangesLoss(Callback):
    """Sets an attribute of the module by the epoch: a curriculum."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.weight_of_loss = 1.0 / (1 + trainer.current_epoch)


class WeighsLoss(Regressor):
    weight_of_loss = 1.0

    def training_step(self, batch, batch_idx):
        return self.weight_of_loss * super().training_step(batch, batch_idx)


HABITS = [
    ddp(
        Regressor,
        stock("EarlyStopping", monitor="val/loss", patience=1, mode="max"),
        "trainer.max_epochs=4",
        name="EarlyStopping",
    ),
    # what it monitors is there when an epoch ends, so it cannot validate within one
    fsdp(
        Regressor,
        stock("EarlyStopping", monitor="train/loss", patience=1, mode="max"),
        "trainer.max_epochs=4",
        name="EarlyStoppingTrain",
        resume=INSIDE,
    ),
    ddp(Regressor, stock("LearningRateMonitor", log_momentum="true"), name="LearningRateMonitor"),
    fsdp(
        Regressor,
        stock("ModelCheckpoint", monitor="val/loss", save_top_k=2, save_last="true"),
        name="ModelCheckpoint",
        sample=True,
    ),
    ddp(Finetuned, callback(Unfreeze), name="Unfreeze", sample=True),
    fsdp(
        Finetuned,
        stock("BackboneFinetuning", unfreeze_backbone_at_epoch=1),
        name="BackboneFinetuning",
    ),
    ddp(Regressor, callback(CountsBatches), name="CountsBatches", sample=True),
    fsdp(Regressor, callback(LowersRate), name="LowersRate"),
    fsdp(Regressor, callback(Probe), name="Probe"),
    ddp(Regressor, callback(OnlineEvaluator), name="OnlineEvaluator"),
    fsdp(TrainsProbe, callback(AttachesProbe), name="AttachesProbe"),
    fsdp(Regressor, callback(StepsPerSecond), name="StepsPerSecond"),
    fsdp(WeighsLoss, callback(ChangesLoss), name="ChangesLoss"),
    ddp(Regressor, callback(GradientAccumulator), name="GradientAccumulator"),
    ddp(Regressor, callback(KeepsBest), name="KeepsBest"),
]
