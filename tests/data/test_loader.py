"""The loader stays one batch ahead.

On a CPU the device's streams do nothing, so only the order is tested.
"""

import lightning.pytorch as L
import pytest

from armature.data import loader
from armature.data.base import DataModule


class Ours(DataModule):
    pass


class PlainMoves(L.LightningDataModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class ModuleBefore(L.LightningModule):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class ModuleAfter(L.LightningModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class TakesIterator(L.LightningModule):
    def validation_step(self, dataloader_iter): ...


@pytest.mark.parametrize(
    ("data", "module", "expected"),
    [
        (
            Ours(),
            TakesIterator(),
            False,
        ),  # it moves its batches, as under Lightning
        (Ours(), L.LightningModule(), True),
        (Ours(), ModuleAfter(), True),  # it sees batches on the device anyway
        (Ours(), ModuleBefore(), False),
        (PlainMoves(), L.LightningModule(), False),
        (Ours(), None, True),
    ],
)
def test_batches_are_not_moved_before_hooks_that_see_them_off_the_device(data, module, expected):
    owners = [data] if module is None else [data, module]
    assert loader.copies_ahead(owners, ours=False, workers=True) is expected
    # samples of users may change with a step, unless processes read ahead anyway
    assert not loader.copies_ahead(owners, ours=False, workers=False)
    assert loader.copies_ahead(owners, ours=True, workers=False) is expected
