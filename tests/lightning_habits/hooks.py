"""Hooks of the Trainer, what they set and what they ask it."""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from tests.lightning_habits import data
from tests.lightning_habits.habit import INSIDE, OWED, ddp, fsdp, single
from tests.lightning_habits.loaders import Vectors
from tests.lightning_habits.regression import Regressor


class Annealing(Regressor):
    """Weights of the loss by global_step, current_epoch and the Trainer's counts of batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        done = self.global_step / self.trainer.estimated_stepping_batches
        within = batch_idx / self.trainer.num_training_batches
        return loss * (1 + done + within + 0.1 * self.current_epoch)

    def on_train_epoch_end(self):
        self.log("val_of_epoch", self.trainer.callback_metrics["val/loss"])


class SkipsTheRest(Regressor):
    """on_train_batch_start returns -1: the rest of the epoch is left out."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


class OwnCallbacks(Regressor):
    """configure_callbacks."""

    def configure_callbacks(self):
        return [L.pytorch.callbacks.EarlyStopping("val/loss", mode="max", patience=1)]


class Seeds(Regressor):
    """seed_everything in the constructor, and random initial weights by hand."""

    def __init__(self, seed: int = 42):
        L.seed_everything(seed, workers=True)
        super().__init__()
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)


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


class StopsItself(Regressor):
    """trainer.should_stop within training_step."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 13:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class SkipsSteps(Regressor):
    """None from training_step now and then."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 1 else loss


class BeginsForValidation(Regressor):
    """Sets when training and an epoch begin what the validation reads, and draws there and in
    it.
    """

    def on_train_start(self):
        self.scale = 2.0
        torch.rand(1)

    def on_train_epoch_start(self):
        self.noise = torch.rand(8).to(self.device)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + 0.1 * self.noise, y), batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x + self.noise + 0.1 * torch.rand(x.shape).to(x)), y)
        self.log("val/noisy", self.scale * loss, sync_dist=True)
        return super().validation_step(batch, batch_idx)


class ChangesByEpoch(Vectors):
    """Samples and batches change with attributes that a hook sets by the epoch."""

    class Samples(data.Samples):
        difficulty = 0.0

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + 0.1 * self.difficulty, y

    def __init__(self, batch_size: int = 8, num_workers: int = 0):
        super().__init__(batch_size, num_workers)
        self.scale = 1.0

    def setup(self, stage=None):
        super().setup(stage)
        self.train = self.Samples(self.sample, range(48))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * self.scale, batch[1]


class ByEpoch(Regressor):
    """Sets a loss weight, a frozen part's mode, the rate, and attributes of the data module and its
    dataset.
    """

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.alpha, self.epochs = 1.0, 0

    def on_train_epoch_start(self):
        self.alpha, self.epochs = 1.0 / (1 + self.current_epoch), self.epochs + 1
        self.backbone.eval()
        self.log("epochs", float(self.epochs))
        if self.current_epoch:
            self.optimizers().param_groups[0]["lr"] *= 0.5
            self.trainer.datamodule.scale = 2.0
            self.trainer.datamodule.train.difficulty = float(self.current_epoch)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["epochs"] = self.epochs

    def on_load_checkpoint(self, checkpoint):
        self.epochs = checkpoint["epochs"]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.alpha * F.mse_loss(self.net(self.backbone(x)), y)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class SeedsValidation(Regressor):
    """Noise of the validation from a fixed seed, as diffusion models have it."""

    def on_validation_epoch_start(self):
        torch.manual_seed(0)
        np.random.seed(0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step(
            (x + 0.1 * torch.randn_like(x) + 0.01 * float(np.random.randn()), y), batch_idx
        )

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return super().validation_step((x + 0.1 * torch.randn_like(x), y), batch_idx)


class Bank(Regressor):
    """Reads the whole training data at each validation, for a class statistic or nearest
    neighbors.
    """

    def on_validation_epoch_end(self):
        loader = self.trainer.datamodule.train_dataloader()
        bank = torch.cat([x for x, _ in loader])
        assert len(bank) == len(self.trainer.datamodule.train)
        self.log("val/bank", bank.double().mean().float())


class Iterator(Regressor):
    """training_step takes the iterator of the loader, and moves its batches."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        assert batch[0].device.type == "cpu"  # Lightning does not move it
        x, y = self.trainer.strategy.batch_to_device(batch)
        loss = F.mse_loss(self(x), y)
        self.log("train/mse", loss, on_epoch=True, batch_size=len(x), sync_dist=True)
        return loss


class LogsHparams(Regressor):
    """TensorBoard's idiom: hyperparameters with metrics that they are compared by."""

    def on_train_start(self):
        self.logger.log_hyperparams(self.hparams, {"hp/loss": 0.0, "hp/rate": 0.0})

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)
        self.log("hp/loss", loss, sync_dist=True)
        self.logger.log_metrics({"by_hand": float(self.current_epoch)}, step=self.global_step)

    def on_train_epoch_end(self):
        experiment = self.logger.experiment
        for name, p in self.named_parameters():
            value = p.full_tensor() if hasattr(p, "full_tensor") else p
            experiment.add_histogram(name, value, self.current_epoch)
        experiment.add_scalars("several", {"a": 1.0, "b": 2.0}, self.global_step)


class Draws(Regressor):
    """Dropout, mixup from torch's generator, and noise from numpy's."""

    def shared_step(self, batch, stage):
        if stage == "train":
            import numpy as np

            x, y = batch
            mix = torch.rand((), device=x.device) * 0.2
            order = torch.randperm(len(x), device=x.device)
            noise = torch.tensor(
                np.random.normal(scale=0.01, size=x.shape), dtype=x.dtype, device=x.device
            )
            batch = (
                F.dropout((1 - mix) * x + mix * x[order] + noise, 0.1),
                (1 - mix) * y + mix * y[order],
            )
        return super().shared_step(batch, stage)


class Summarized(Regressor):
    """An example for summaries and graphs; a scripted layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.0),
            torch.jit.script(nn.Tanh()),
            nn.Linear(16, 1),
        )
        self.example_input_array = torch.ones(4, 8)


HABITS = [
    fsdp(Annealing),
    ddp(SkipsTheRest),
    fsdp(OwnCallbacks),
    ddp(Seeds),
    ddp(Printer),
    fsdp(StopsItself),
    # the ranks have to agree on it
    single(SkipsSteps),
    ddp(BeginsForValidation, random=True, resume=OWED),
    ddp(ByEpoch, "data.num_workers=1", data=ChangesByEpoch, sample=True, resume=INSIDE),
    fsdp(SeedsValidation, random=True),
    fsdp(Bank, "data.num_workers=1", data=Vectors),
    fsdp(Iterator),
    fsdp(LogsHparams, "logger=tensorboard"),
    fsdp(Summarized, "logger=tensorboard", "+logger.tensorboard.log_graph=true"),
    fsdp(Draws, random=True, sample=True),
]
