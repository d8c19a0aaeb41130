"""Modules and callbacks as users of Lightning and of the lightning-hydra-template write them."""

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from armature.data.base import DataModule


class FineTuneLearningRateFinder(LearningRateFinder):
    """The example of Lightning's documentation."""


class Template(L.LightningModule):
    """The template's module: a network and factories, under its own names."""

    def __init__(self, net: torch.nn.Module, optimizer, scheduler, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net


class Plain(L.LightningModule):
    """A module that builds everything itself."""

    def __init__(self, width: int = 8, optimizer: str = "adam", model="net") -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 1)


class Inherited(Plain):
    def __init__(self, depth: int = 1, **kwargs) -> None:
        super().__init__(**kwargs)


class Ignores(L.LightningModule):
    """Lightning's GAN example: `**kwargs` swallows what the module does not know."""

    def __init__(self, lr: float = 0.1, **kwargs) -> None:
        super().__init__()
        self.save_hyperparameters()


class Reads(Ignores):
    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())


class Returns(Ignores):
    """The key of what Lightning takes is no use of the hyperparameter."""

    def configure_optimizers(self):
        return {
            "optimizer": torch.optim.SGD(self.parameters()),
            "lr_scheduler": {"scheduler": None},
        }


class Bare(L.LightningModule):
    pass


class LoadsItself(DataModule):
    """Ours, with loaders as Lightning's data modules have them."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(16, 2), batch_size=4)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(16, 2), batch_size=4)


class LoadsAsWell(LoadsItself):
    def test_dataloader(self):
        return [super().test_dataloader(), super().val_dataloader()]


class AddsToOurs(DataModule):
    def val_dataloader(self):
        return [super().val_dataloader(), super().test_dataloader()]
