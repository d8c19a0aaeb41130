"""Folds: disjoint, complete, and the same in every run."""

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from armature.data import columns, digits
from armature.errors import ConfigError
from example.data import MoonsData
from tests.data.feeding import feed, fit
from tests.data.test_feed import Recorder

KEYS = {"fold": 1, "folds": 3}


class Plain(L.LightningDataModule):
    def __init__(self, sampler=None):
        super().__init__()
        self.sampler = sampler

    def train_dataloader(self):
        data = TensorDataset(torch.arange(10))
        return DataLoader(data, batch_size=4, shuffle=self.sampler is None, sampler=self.sampler)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(90, 99)))


def of_table(split, fold):
    return columns.split_indices(
        50, val_fraction=0.1, test_fraction=0.2, fold=fold, folds=3
    )[split]  # fmt: skip


def of_digits(split, fold):
    return digits.split_indices(digits.load_digits()[1], fold=fold, folds=3)[split]


def of_any(split, fold):
    return columns.split_indices(
        50, val_fraction=0, test_fraction=0, fold=fold, folds=3
    )[split]  # fmt: skip


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("indices", "size"), [(of_table, 40), (of_digits, 1445 + 176), (of_any, 50)]
)
def test_folds_are_disjoint_and_hold_all_but_the_test_samples(indices, size):
    held_out = [indices("val", fold) for fold in range(3)]
    assert len(np.unique(np.concatenate(held_out))) == sum(map(len, held_out)) == size
    for fold, part in enumerate(held_out):
        train = indices("train", fold)
        assert len(np.union1d(part, train)) == len(part) + len(train) == size
        assert abs(len(part) - size / 3) < 5
    if indices is not of_any:
        assert np.array_equal(indices("test", 0), indices("test", 2))


def test_a_fold_of_the_training_samples_replaces_the_validation_samples():
    data = MoonsData(samples=30, held_out=6, noise=0.1)
    whole = data.dataset("train").inputs
    made = feed(data, **KEYS, global_batch_size=4)
    seen = [torch.cat([b["inputs"] for b in made.loaders(split)[0]]) for split in ("train", "val")]
    assert [len({tuple(row) for row in part.tolist()}) for part in seen] == [20, 10]
    assert {tuple(row) for row in torch.cat(seen).tolist()} == {tuple(r) for r in whole.tolist()}


@pytest.mark.guarantee
@pytest.mark.filterwarnings("ignore:.*shuffling enabled")
def test_a_run_validates_on_the_fold(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "training_step", lambda self, batch, _: self.weight.sum())
    task, fed, _ = fit(Plain(), Recorder(), tmp_path, steps=2, **KEYS)
    (held_out,) = fed.loaders("val")
    assert task.validated == [(0, batch.tolist()) for (batch,) in held_out]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Plain(WeightedRandomSampler([1.0] * 10, 10)), "with a WeightedRandomSampler"),
        (Plain(range(3)), "with a range"),
    ],
)
def test_samples_without_a_fold_are_refused_by_name(data, expected):
    with pytest.raises(
        ConfigError, match=f"data.folds=3: Plain trains on a DataLoader {expected}.*"
    ):
        feed(data, **KEYS)


def test_more_folds_than_samples_are_refused():
    with pytest.raises(ConfigError, match=r"data\.folds=60: 50 samples"):
        columns.split_indices(50, val_fraction=0, test_fraction=0, fold=0, folds=60)
