"""Callbacks of users."""

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from torch import nn

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


class Counts(Callback):
    """State in state_dict, a value logged from a callback."""

    def __init__(self):
        self.state = {"batches": 0, "epochs": 0}

    @property
    def state_key(self):
        return "Counts[mine]"

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


class OwnEMA(Callback):
    """A moving average as many write it: a deep copy in on_fit_start, kept by on_save_checkpoint of
    the callback.
    """

    def __init__(self, decay: float = 0.9):
        self.decay, self.average = decay, None

    def on_fit_start(self, trainer, pl_module):
        if self.average is None:
            self.average = {
                name: value.detach().clone() for name, value in pl_module.state_dict().items()
            }

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in pl_module.state_dict().items():
            self.average[name] = self.average[name].to(
                value.device
            )  # a checkpoint's tensors are on the CPU
            self.average[name].mul_(self.decay).add_(value, alpha=1 - self.decay)
        total = sum(value.float().sum() for value in self.average.values())
        pl_module.log(
            "average", total if not hasattr(total, "full_tensor") else total.full_tensor()
        )

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["my_average"] = self.average

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.average = checkpoint["my_average"]


class StopsByHand(Callback):
    """trainer.should_stop, set by a condition."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 2 and batch_idx == 3:
            trainer.should_stop = True


class LowersRate(Callback):
    """Sets the learning rate of the optimizer at the start of an epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + trainer.current_epoch)


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


class CopiesModule(Callback):
    """A deep copy of the whole module at the end of an epoch."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        twin = copy.deepcopy(pl_module.net)
        assert sum(p.numel() for p in twin.parameters()) == sum(
            p.numel() for p in pl_module.net.parameters()
        )


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


class LogsAll(Callback):
    """Logs in many hooks, and draws random numbers of its own."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.log("from_callback/epoch", float(trainer.current_epoch))

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pl_module.log("from_callback/rate", optimizer.param_groups[0]["lr"])

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("from_callback/val", float(torch.rand(3).mean() * 0 + 1))
        torch.rand(5)

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ):
        if batch_idx == 0:
            self.outputs = outputs


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


class ChangesLoss(Callback):
    """Sets an attribute of the module by the epoch: a curriculum."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.weight_of_loss = 1.0 / (1 + trainer.current_epoch)


class Weighted(Regressor):
    weight_of_loss = 1.0

    def training_step(self, batch, batch_idx):
        return self.weight_of_loss * super().training_step(batch, batch_idx)


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


class CountsSaved(ModelCheckpoint):
    """Logs how many checkpoints are kept; by steps, with a metric of the validation that
    follows.
    """

    def __init__(self) -> None:
        super().__init__(monitor="val/loss", every_n_train_steps=2, save_top_k=-1)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("saved", float(len(self.best_k_models)))


def throughput() -> Callback:
    """Lightning's ThroughputMonitor, which takes a function."""
    from lightning.pytorch.callbacks import ThroughputMonitor

    return ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3)


class OfSeveralLoaders(Callback):
    """Lightning 1's signature, in which the loader's number has no default."""

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx
    ):
        pl_module.seen = dataloader_idx


class TestsSeveralLoaders(Regressor):
    def test_step(self, batch, batch_idx, dataloader_idx):
        return self.shared_step(batch, "test")
