"""StopIteration of a user's code is an error, not the end of the data."""

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from armature.data.samples import Samples
from armature.training.trainer import Trainer

WORDS = "raised StopIteration, as next\\(\\) does when an iterator has ended"


class Module(L.LightningModule):
    def __init__(self, where):
        super().__init__()
        self.net, self.where, self.others = torch.nn.Linear(1, 1), where, iter(range(2))

    def compute(self, name, batch):
        if self.where == name:
            next(self.others)
        return self.net(batch).mean()

    def training_step(self, batch, batch_idx):
        return self.compute("training_step", batch)

    def validation_step(self, batch, batch_idx):
        self.compute("validation_step", batch)

    def test_step(self, batch, batch_idx):
        self.compute("test_step", batch)

    def predict_step(self, batch, batch_idx):
        return self.compute("predict_step", batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.compute("on_train_batch_end", batch)

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.compute("on_validation_batch_start", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakesIterator(Module):
    def training_step(self, dataloader_iter):
        batch, *_ = next(dataloader_iter)
        return self.net(batch).mean()


def trainer():
    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


@pytest.mark.parametrize(
    "where",
    [
        "training_step",
        "on_train_batch_end",
        "validation_step",
        "on_validation_batch_start",
        "test_step",
        "predict_step",
    ],
)
def test_a_step_or_hook_that_meets_the_end_of_an_iterator_ends_the_run(where):
    loader, one = DataLoader(torch.ones(6, 1), batch_size=1), trainer()
    run, loaders = {"test_step": (one.test, 1), "predict_step": (one.predict, 1)}.get(
        where, (one.fit, 2)
    )
    with pytest.raises(RuntimeError, match=WORDS):
        run(Module(where), *[loader] * loaders)


@pytest.mark.filterwarnings("ignore")  # Lightning warns of dataloader_iter
def test_steps_that_take_the_iterator_end_with_it():
    one = trainer()
    loader = DataLoader(torch.ones(6, 1), batch_size=1)
    one.fit(TakesIterator(None), loader, loader)
    assert one.global_step == 6


def test_a_sample_that_meets_the_end_of_an_iterator_is_an_error():
    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return next(iter(()))

    with pytest.raises(RuntimeError, match="Data or its collate_fn " + WORDS):
        Samples(Data(), size=4, seed=0, training=True, foreign=True).__getitems__([0, 1])
