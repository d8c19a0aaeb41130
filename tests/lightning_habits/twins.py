"""Code that names Lightning by its other package, as code of its first years does."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.lightning_habits import data


class OtherName(pl.LightningModule):
    """Keywords for hyperparameters, a schedule as long as `len(datamodule)` says, and a callback of its own."""

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
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3 * self.steps)
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
