"""A Trainer in the test's own process, without logger, files and screen, and a module for it."""

from typing import Any

import lightning.pytorch as L
import torch

from armature.strategies.single import SingleDevice
from armature.training.trainer import Trainer
from tests.support.parity.harness import QUIET


def quiet_trainer(**settings: Any) -> Trainer:
    """Return a Trainer on CPUs, in one process unless the settings name another strategy."""
    return Trainer(**{**QUIET, "strategy": SingleDevice(), **settings})


class Squares(L.LightningModule):
    """Makes the squared output of a layer of four inputs small; tests change what they look at."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
