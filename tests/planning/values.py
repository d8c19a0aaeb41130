"""A module whose step reads values, and data that are a plain LightningDataModule's."""

from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Data(L.LightningDataModule):
    def __init__(self, **others: Any) -> None:
        super().__init__()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(64, 9, 16), batch_size=4)  # pyright: ignore[reportArgumentType]


class Module(L.LightningModule):
    def __init__(self, **others: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.net(batch)
        return found[found > 0].square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())
