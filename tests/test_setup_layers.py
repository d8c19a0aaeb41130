"""Modules that make their layers in `setup(stage)`, from the data, are loaded by what measures
them.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from armature.errors import ConfigError
from armature.loading import WithWeights, build_callbacks, load_task, task_and_weights
from armature.strategies.single import SingleDevice


class Rows(L.LightningDataModule):
    def prepare_data(self):
        self.train_size = 3  # our data modules have another of this name

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 3), batch_size=2)  # pyright: ignore[reportArgumentType]

    test_dataloader = train_dataloader


class MakesLayers(L.LightningModule):
    """Makes them anew whenever it is asked."""

    def setup(self, stage):
        self.net = torch.nn.Linear(self.trainer.datamodule.train_size, 1)  # pyright: ignore[reportAttributeAccessIssue]

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        enable_checkpointing=False,
        **options,
    )


@pytest.mark.filterwarnings("ignore")
def test_their_weights_are_loaded_once_setup_was_called(tmp_path: Path):
    trained, checkpoint = MakesLayers(), tmp_path / "step=000002"
    fit = trainer(strategy=SingleDevice())
    fit.fit(trained, datamodule=Rows())
    fit.save_checkpoint(checkpoint)
    cfg = OmegaConf.create({"task": {"_target_": f"{__name__}.MakesLayers"}, "callbacks": None})
    data = Rows()
    loaded, read = task_and_weights(cfg, checkpoint)
    test = trainer(strategy=WithWeights(torch.device("cpu"), read))
    (measured,) = test.test(loaded, datamodule=data, verbose=False)
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert measured["test/loss"] == pytest.approx(float(trained.training_step(torch.ones(4, 3), 0)))
    with pytest.raises(
        ConfigError,
        match=r"net.bias.*setup. of MakesLayers and of callbacks is called by evaluate.py and",
    ):
        load_task(cfg, checkpoint)


class AddsLayers(L.Callback):
    def setup(self, trainer, pl_module, stage):
        pl_module.head = torch.nn.Linear(3, 1)


def callbacks(**kinds: type) -> Any:
    nodes = {
        name: {"_target_": f"{kind.__module__}.{kind.__qualname__}"} for name, kind in kinds.items()
    }
    return OmegaConf.create({"task": {"_target_": f"{__name__}.MakesLayers"}, "callbacks": nodes})


@pytest.mark.filterwarnings("ignore")
def test_layers_that_a_callback_makes_are_loaded_once_its_setup_was_called(tmp_path: Path):
    trained, checkpoint = MakesLayers(), tmp_path / "step=000002"
    fit = trainer(strategy=SingleDevice(), callbacks=[AddsLayers()])
    fit.fit(trained, datamodule=Rows())
    fit.save_checkpoint(checkpoint)
    cfg, data = callbacks(adds=AddsLayers), Rows()
    loaded, read = task_and_weights(cfg, checkpoint)
    strategy = WithWeights(torch.device("cpu"), read)
    test = trainer(strategy=strategy, callbacks=build_callbacks(cfg))
    test.test(loaded, datamodule=data, verbose=False)
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"head.*and of callbacks is called by evaluate.py"):
        load_task(cfg, checkpoint)
