"""Modules that make their layers in `setup(stage)`, from the data, are loaded by what measures
them.
"""

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

    def state_dict(self):
        return {"saved": 1}

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)


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
        max_epochs=1,
        enable_checkpointing=False,
        **options,
    )


class AddsLayers(L.Callback):
    def setup(self, trainer, pl_module, stage):
        pl_module.head = torch.nn.Linear(3, 1)


@pytest.mark.filterwarnings("ignore")
def test_weights_of_the_modules_and_a_callbacks_layers_are_loaded_once_setup_was_called(tmp_path):
    trained, checkpoint = MakesLayers(), tmp_path / "step=000002"
    fit = trainer(strategy=SingleDevice(), callbacks=[AddsLayers()])
    fit.fit(trained, datamodule=Rows())
    fit.save_checkpoint(checkpoint)
    named = {name: {"_target_": f"{__name__}.{name}"} for name in ("MakesLayers", "AddsLayers")}
    cfg: Any = OmegaConf.create(
        {"seed": 0, "task": named["MakesLayers"], "callbacks": {"adds": named["AddsLayers"]}}
    )
    loaded, read = task_and_weights(cfg, checkpoint)
    strategy = WithWeights(torch.device("cpu"), read)
    test = trainer(strategy=strategy, callbacks=build_callbacks(cfg))
    (measured,) = test.test(loaded, datamodule=(rows := Rows()), verbose=False)
    assert rows.saved  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert measured["test/loss"] == pytest.approx(float(trained.training_step(torch.ones(4, 3), 0)))
    with pytest.raises(ConfigError, match=r"Not in the model: head"):  # no Trainer calls `setup`
        load_task(cfg, checkpoint)
