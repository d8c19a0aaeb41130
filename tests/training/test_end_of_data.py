"""StopIteration of a user's dataset is an error, not the end of the data."""

import pytest
import torch

from armature.data.samples import Samples


def test_a_sample_that_meets_the_end_of_an_iterator_is_an_error():
    class Data(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return next(iter(()))

    with pytest.raises(RuntimeError, match="Data or its collate_fn raised StopIteration"):
        Samples(Data(), size=4, seed=0, training=True, foreign=True).__getitems__([0, 1])
