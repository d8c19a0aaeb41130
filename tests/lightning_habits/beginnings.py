"""What hooks set at the start of training or of an epoch, and what they read of the data."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.lightning_habits import data
from tests.lightning_habits.plain import Vectors
from tests.lightning_habits.regression import Regressor


class Weighted(Vectors):
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


class TeacherAtStart(Regressor):
    """Copies the model into its teacher in on_train_start, which also runs after a resume."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_start(self):
        self.teacher.load_state_dict(self.net.state_dict())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 0.1)

    def validation_step(self, batch, batch_idx):
        self.log("val/teacher", F.mse_loss(self.teacher(batch[0]), batch[1]), sync_dist=True)
        return super().validation_step(batch, batch_idx)


class Bank(Regressor):
    """Reads the whole training data at each validation, for a class statistic or nearest
    neighbors.
    """

    def on_validation_epoch_end(self):
        loader = self.trainer.datamodule.train_dataloader()
        bank = torch.cat([x for x, _ in loader])
        assert len(bank) == len(self.trainer.datamodule.train)
        self.log("val/bank", bank.double().mean().float())


class DrawsPerEpoch(Regressor):
    """Draws a mask for the whole epoch when the epoch begins."""

    def on_train_epoch_start(self):
        self.mask = (torch.rand(8) > 0.5).float().to(self.device)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x * self.mask, y), batch_idx)


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
