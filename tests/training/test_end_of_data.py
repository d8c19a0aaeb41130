"""StopIteration of a user's code is an error, not the end of the data."""

import pytest
import torch
from torch.utils.data import DataLoader

from armature.data.samples import Samples
from tests.trainers import Squares, quiet_trainer

WORDS = "raised StopIteration, as next\\(\\) does when an iterator has ended"


class Module(Squares):
    def __init__(self, where):
        super().__init__()
        self.where, self.others = where, iter(range(2))

    def training_step(self, batch, batch_idx):
        if self.where == "training_step":
            next(self.others)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.where == "on_train_batch_end":
            next(self.others)


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
def test_a_step_or_hook_that_meets_the_end_of_an_iterator_ends_the_run(where):
    trainer = quiet_trainer(max_epochs=1)
    with pytest.raises(RuntimeError, match=WORDS):
        trainer.fit(Module(where), DataLoader(torch.ones(6, 4), batch_size=1))


def test_a_sample_that_meets_the_end_of_an_iterator_is_an_error():
    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return next(iter(()))

    with pytest.raises(RuntimeError, match="Data or its collate_fn " + WORDS):
        Samples(Data(), size=4, seed=0, training=True, foreign=True).__getitems__([0, 1])
