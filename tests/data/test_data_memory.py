"""Data that memory cannot hold are refused in one message that names their size, wherever they are
built.
"""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from armature.data.base import DataModule
from armature.data.feed import build
from armature.errors import ConfigError
from tests.data.feeding import feed

HUGE = 10**14
FITS = "this machine's memory cannot hold"


class InDataset(DataModule):
    def __init__(self, *, samples: int, width: int = 2) -> None:
        super().__init__()
        self.samples, self.width = samples, width

    def dataset(self, split):
        return TensorDataset(torch.zeros(self.samples if split == "val" else 4, self.width))


class InSetup(L.LightningDataModule):
    def __init__(self, samples: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        self.rows = np.ones(self.hparams["samples"])

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.from_numpy(self.rows)))


class InConstructor(L.LightningDataModule):
    def __init__(self, samples: int = 8) -> None:
        super().__init__()
        self.rows = bytearray(samples)


def test_a_split_is_named_with_the_key_of_its_size():
    fed = feed(InDataset(samples=HUGE), global_batch_size=2000)
    assert fed.train_size == 4
    with pytest.raises(
        ConfigError, match=rf"{FITS} the data of InDataset \(.*test_data_memory.py:\d+\)"
    ) as caught:
        fed.loaders("val")
    assert f"Type a smaller number (data.samples={HUGE}), or" in str(caught.value)


def test_a_plain_data_module_is_answered_once():
    with pytest.raises(
        ConfigError, match=rf"{FITS} the data of InSetup \(.*data.samples={HUGE}\)"
    ) as caught:
        feed(InSetup(samples=HUGE))
    assert str(caught.value).count(FITS) == 1


def test_data_that_their_constructor_makes_are_named_by_their_class():
    node = {"_target_": f"{__name__}.InConstructor", "samples": HUGE}
    with pytest.raises(
        ConfigError, match=rf"{FITS} what \S*InConstructor makes \(MemoryError.*data.samples={HUGE}"
    ):
        build(OmegaConf.create({"seed": 0, "data": node}))


def test_another_error_of_a_data_set_stays_what_it_is():
    with pytest.raises(RuntimeError, match="negative"):
        feed(InDataset(samples=-1), global_batch_size=1).loaders("val")
