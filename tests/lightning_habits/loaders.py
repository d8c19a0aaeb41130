"""Data that change while training, and loaders and samplers of one's own."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from tests.lightning_habits import data
from tests.lightning_habits.plain import Vectors
from tests.lightning_habits.regression import Regressor


class Negatives(data.Samples):
    """Recommenders' data set: negatives are drawn anew when it is asked to."""

    def __init__(self, sample, indices):
        super().__init__(sample, indices)
        self.order = list(range(len(indices)))
        self.draw()

    def draw(self):
        self.negatives = np.random.randint(300, 400, len(self.indices))

    def __getitem__(self, index):
        x, y = super().__getitem__(self.order[index])
        return x - 0.1 * data.regression(int(self.negatives[index]))[0], y


class NegativeData(Vectors):
    def setup(self, stage=None):
        super().setup(stage)
        self.train = Negatives(data.regression, range(48))


class DrawsAtStart(Regressor):
    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.draw()


class GrowingData(Vectors):
    """Active learning: the module adds samples at the end of an epoch."""

    def setup(self, stage=None):
        super().setup(stage)
        self.train = data.Samples(data.regression, list(range(24)))


class Labels(Regressor):
    def on_train_epoch_end(self):
        known = self.trainer.datamodule.train.indices
        known.extend(range(len(known), len(known) + 8))


class RepeatLoader(DataLoader):
    """A loader that changes batches as it serves them."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield 2 * x, y + 0.5


class OwnLoaderClass(Vectors):
    def train_dataloader(self):
        return RepeatLoader(self.train, batch_size=self.batch_size, shuffle=True)


class Wrapped:
    """A loader around a loader, as prefetchers have it."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for x, y in self.loader:
            yield 2 * x, y + 0.5

    def __getattr__(self, name):
        return getattr(self.loader, name)


class WrappedLoader(Vectors):
    def train_dataloader(self):
        return Wrapped(DataLoader(self.train, batch_size=self.batch_size, shuffle=True))


class ListsOfIndices(Vectors):
    """A batch sampler that is a list of lists, as torch takes any iterable."""

    def train_dataloader(self):
        batches = (
            torch.randperm(48, generator=torch.Generator().manual_seed(3)).reshape(6, 8).tolist()
        )
        return DataLoader(self.train, batch_sampler=batches)


class OutOfOrder(Vectors):
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True, num_workers=2, in_order=False)


class WithReplacement(Vectors):
    def train_dataloader(self):
        sampler = torch.utils.data.RandomSampler(self.train, replacement=True, num_samples=44)
        return DataLoader(self.train, batch_size=8, sampler=sampler)


def rank_and_size():
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if there else (0, 1)


class WeightedDistributed(Sampler):
    """The usual answer to "a weighted sampler for DDP": no subclass of torch's, it asks for its
    rank itself.
    """

    def __init__(self, weights):
        self.rank, self.ranks = rank_and_size()
        self.weights, self.epoch = torch.as_tensor(weights), 0

    def __len__(self):
        return len(self.weights) // self.ranks

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        drawn = torch.multinomial(
            self.weights, len(self.weights), True, generator=generator
        ).tolist()
        return iter(drawn[self.rank :: self.ranks])


class OwnDistributedSampler(Vectors):
    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=8, sampler=WeightedDistributed(torch.linspace(0.1, 1, 48))
        )


class SplitByNode(IterableDataset):
    """webdataset's split_by_node: the stream asks for its rank, when it is read."""

    def __iter__(self):
        rank, ranks = rank_and_size()
        return map(data.regression, range(rank, 48, ranks))


class NodeStream(Vectors):
    def train_dataloader(self):
        return DataLoader(SplitByNode(), batch_size=8)


class NodeStreamHeldOut(Vectors):
    def val_dataloader(self):
        return DataLoader(SplitByNode(), batch_size=8)


class ShardHeldOut(Vectors):
    """A Subset of this rank's samples, and the test's split likewise by a sampler."""

    def val_dataloader(self):
        rank, ranks = rank_and_size()
        return [
            DataLoader(self.val, batch_size=8),
            DataLoader(Subset(self.val, range(rank, 16, ranks)), batch_size=8),
        ]


class ShardTest(Vectors):
    def test_dataloader(self):
        return DataLoader(
            self.test, batch_size=8, sampler=WeightedDistributed(torch.linspace(0.1, 1, 16))
        )


class ShuffledByRank(Vectors):
    """A dataset that shuffles itself, on each rank by another seed."""

    def setup(self, stage=None):
        super().setup(stage)
        order = np.random.default_rng(rank_and_size()[0]).permutation(48).tolist()
        self.train = data.Samples(self.sample, order)


class OneByOne(Vectors):
    """As for pictures of unequal sizes."""

    def val_dataloader(self):
        return DataLoader(Subset(self.val, range(15)), batch_size=1)


class BufferShuffled(IterableDataset):
    """webdataset's shuffle: a buffer, and Python's global random numbers."""

    def __iter__(self):
        buffer = []
        for index in range(48):
            buffer.append(index)
            if len(buffer) >= 12:
                yield data.regression(buffer.pop(random.randrange(len(buffer))))
        while buffer:
            yield data.regression(buffer.pop(random.randrange(len(buffer))))


class ShuffledStream(Vectors):
    def train_dataloader(self):
        return DataLoader(BufferShuffled(), batch_size=8)


class Episodes(Sampler):
    """Few-shot learning: batches of classes and of their samples, drawn from NumPy's global
    numbers.
    """

    def __len__(self):
        return 6

    def __iter__(self):
        for _ in range(6):
            classes = np.random.choice(4, 2, replace=False)
            yield [int(4 * i + c) for c in classes for i in np.random.choice(12, 4, replace=False)]


class EpisodeData(Vectors):
    sample = staticmethod(data.regression)

    def train_dataloader(self):
        return DataLoader(self.train, batch_sampler=Episodes())


class Endless(Sampler):
    """As detectron's TrainingSampler, whose length is that of an epoch."""

    def __len__(self):
        return 48

    def __iter__(self):
        while True:
            yield from torch.randperm(48).tolist()


class EndlessData(Vectors):
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=Endless())
