"""A regressor, which most habits change in one way."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Regressor(L.LightningModule):
    """The module of most of these: a shared step, logged losses."""

    def __init__(self, lr: float = 0.05, width: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)

    def shared_step(self, batch, stage):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")

    def test_step(self, batch, batch_idx):
        return self.shared_step(batch, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)

    def sgd(self):
        return Regressor.configure_optimizers(self)


class Manual(Regressor):
    """One optimizer, one step per batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        loss = self.shared_step(batch, "train")
        self.manual_backward(loss)
        opt.step()


class TrainOnly(L.LightningModule):
    """No validation, no test, nothing logged."""

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(8, 1)

    def forward(self, x):
        return self.l1(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)
