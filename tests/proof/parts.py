"""A plain LightningModule and its data, and the same with a leak that `scripts/prove.py` finds."""

import itertools

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Points(L.LightningDataModule):
    """Points, their class, and whether they count."""

    def _points(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        x = 50 * torch.randn(count, 4, generator=generator)  # BatchNorm's eps shows nothing
        return TensorDataset(x, (x[:, 0] > 0).long(), torch.rand(count, generator=generator) < 0.5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._points(80, 0), BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._points(20, 1), BATCH)


class Sound(L.LightningModule):
    """Right under every layout: its BatchNorm is synchronized, its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), self.regularizer(), nn.Linear(8, 2)
        )

    def regularizer(self) -> nn.Module:
        return nn.Identity()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        # rank 0's values: an exception that the contract names
        self.log_dict({"own_loss": loss, "train/loss": loss})
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


_NOISE = torch.Generator().manual_seed(1)  # of no object: nothing saves its state


class DrawsItsOwn(Sound):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0] + torch.randn(batch[0].shape, generator=_NOISE, dtype=batch[0].dtype)
        return F.cross_entropy(self.net(x), batch[1])


class Iterates(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)  # an iterator's position cannot be saved

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / next(self.calls)


class OwnValue(Sound):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * batch[0].std()


class MeanOfMeans(Sound):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, counts = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (losses * counts).sum() / counts.sum().clamp(min=1)


class Dropped(Sound):
    def regularizer(self) -> nn.Module:
        return nn.Dropout(0.5)
