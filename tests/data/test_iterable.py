"""IterableDatasets without a length are counted: by the reading that training and evaluation
make.
"""

import random

import pytest
import torch
from torch.utils.data import IterableDataset

from armature.data.iterable import IterableStream
from armature.errors import ConfigError


class LongerByEpoch(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(10 + self.epoch))


class Sifted(IterableDataset):
    """Leaves out samples by chance."""

    def __iter__(self):
        return (i for i in range(100) if random.random() < 0.5 and torch.rand(()).item() < 0.9)


def test_only_training_data_must_have_as_many_samples_in_each_pass():
    stream = IterableStream(LongerByEpoch(), seed=5)
    assert len(stream) == 10
    assert list(stream.records(0, 0)) == [*range(10)]
    with pytest.raises(
        ConfigError, match=r"yields 10 samples in one pass and 11 in the next.*data\.train_limit=…"
    ):
        stream.check_repeats()  # called for training data
    IterableStream(LongerByEpoch(), seed=5, limited=True).check_repeats()


def test_the_samples_that_are_counted_are_those_that_are_read():
    for seed in range(5):
        stream = IterableStream(Sifted(), seed=seed)
        counted = len(stream)
        stream._size = 1000
        assert counted == len(list(stream.records(0, 0)))


def test_counting_leaves_the_global_generators_as_they_are():
    random.seed(3)
    IterableStream(Sifted(), seed=5)
    drawn = random.random()
    random.seed(3)
    assert random.random() == drawn
