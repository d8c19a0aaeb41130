"""Code that names Lightning by its other package, as code of its first years does."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.lightning_habits import data


class OtherName(pl.LightningModule):
    """Keywords for hyperparameters, a schedule as long as `len(datamodule)` says, and a callback of
    its own.
    """

    def __init__(self, width: int = 16, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

    def setup(self, stage):
        self.steps = len(self.trainer.datamodule)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train/mse", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_callbacks(self):
        return [LearningRateMonitor("step")] if self.trainer.loggers else []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.1, total_iters=3 * self.steps
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Folds(pl.LightningDataModule):
    """`setup` has arguments before the stage, and the module has a length and items."""

    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, fold: int = 1, stage=None):
        everything = [data.regression(index) for index in range(64)]
        self.train, self.val = everything[16 * fold :], everything[: 16 * fold]

    def __len__(self):
        return len(self.train) // self.batch_size

    def __getitem__(self, index):
        return self.train[index]

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def teardown(self, *, stage):
        assert stage in ("fit", "test")


class PlainNorms(pl.LightningModule):
    """BatchNorms that are found by their exact type, and one without weights beside the network."""

    def __init__(self, freezes: bool = False):
        super().__init__()
        self.freezes = freezes
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.whiten = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Tanh())

    def loss_of(self, batch):
        return F.mse_loss(self.whiten(self.net(batch[0])), batch[1])

    def on_train_batch_start(self, batch, batch_idx):
        for part in self.net.modules() if self.freezes else ():
            if type(part) is nn.BatchNorm1d:
                part.eval()

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        penalty = sum(p.square().sum() for p in self.net.parameters())
        self.log("val/loss", self.loss_of(batch) + 0.1 * penalty, sync_dist=True)
        self.log("val/penalty", penalty, sync_dist=True)

    def configure_optimizers(self):
        decayed, rest = [], []
        for part in self.net.modules():
            for name, p in part.named_parameters(recurse=False):
                (
                    rest
                    if type(part) in (nn.BatchNorm1d, nn.BatchNorm2d) or name == "bias"
                    else decayed
                ).append(p)
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
