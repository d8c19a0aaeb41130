"""A hook that may gather one value per sample of an uneven validation is named before training."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest

from armature.data.sampler import EvalSampler
from armature.strategies.base import StrategyMixin
from armature.training.unequal_gathers import UnequalGathers, gathering_hook


class Gathers(L.LightningModule):
    def on_validation_epoch_end(self):
        self.collect()

    def collect(self):
        return [self.all_gather(each) for each in ()]


class Trains(L.LightningModule):
    def training_step(self, batch):
        return self.all_gather(self.scale(batch))

    def scale(self, batch):
        return batch

    def validation_step(self, batch):
        return self.scale(batch)


def test_the_hook_of_validation_that_gathers_is_found_through_methods_of_the_module():
    assert gathering_hook(Gathers()) == "on_validation_epoch_end"
    assert gathering_hook(Trains()) is None
    assert gathering_hook(L.LightningModule()) is None


@pytest.mark.parametrize(
    ("size", "batches", "told"),
    [
        (9, 3, "of 9 validation samples rank 0 has 4 and rank 1 has 5"),
        (9, 1, ""),
        (8, 3, ""),
        (0, 0, ""),
    ],
)
def test_an_uneven_validation_is_named_with_its_numbers(size, batches, told, caplog):
    loader = SimpleNamespace(batch_sampler=EvalSampler(size, batch_size=2, rank=0, ranks=2))
    trainer: Any = SimpleNamespace(
        val_dataloaders=[loader], num_val_batches=[batches], strategy=None
    )
    UnequalGathers().on_train_start(trainer, Gathers())
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)
    trainer.val_dataloaders = None
    UnequalGathers().on_train_start(trainer, Gathers())


class Counts(L.LightningModule):
    def training_step(self, batch):
        return self.trainer.strategy.reduce(batch, reduce_op="sum") / self.trainer.world_size


class Indexes(L.LightningModule):
    def training_step(self, batch):
        return self.all_gather(batch)[self.global_rank]


@pytest.mark.parametrize(
    ("ranks", "module", "told"),
    [
        (4, Counts, "world_size"),
        (4, Indexes, "global_rank"),
        (2, Counts, ""),
        (2, Indexes, ""),
        (4, Trains, ""),
    ],
)
def test_a_count_of_processes_is_named_where_several_share_samples(
    monkeypatch, caplog, ranks, module, told
):
    strategy = SimpleNamespace(data_size=2, world_size=ranks)
    monkeypatch.setattr(StrategyMixin, "find", lambda trainer: strategy)
    trainer: Any = SimpleNamespace(val_dataloaders=None)
    UnequalGathers().on_train_start(trainer, module())
    words = f"{module.__name__}.training_step reads {told}. Of the 4 processes, 2 share each sample"
    assert (words in caplog.text) == bool(told)
    assert ("Divide by self.trainer.strategy.data_size," in caplog.text) == bool(told)
