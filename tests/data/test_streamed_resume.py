"""A stream resumes from its position alone: each sample comes once with any workers, ranks and
batch sizes.
"""

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from armature.data.base import DataModule
from armature.data.stream import Stream
from tests.data.feeding import feed, loader


class Counted(Stream):
    """Record (epoch, i) is epoch × 1000 + i."""

    def __init__(self, size: int, *, ends_at: int | None = None) -> None:
        self.size, self.ends_at = size, ends_at

    def __len__(self):
        return self.size

    def records(self, epoch, start):
        yield from (epoch * 1000 + i for i in range(start, self.ends_at or self.size))

    def sample(self, record):
        noise = torch.rand(1) if record < 10_000 else torch.zeros(1)
        return {"inputs": noise, "targets": torch.tensor(record)}


class CountedData(DataModule):
    def __init__(self, size=21, *, ends_at=None):
        super().__init__()
        self.stream = Counted(size, ends_at=ends_at)

    def dataset(self, split):
        return self.stream


def counted(size=21, *, ends_at=None, rank=0, ranks=1, **settings) -> Any:
    sizes = {"global_batch_size": 4, "eval_batch_size": 4}
    made: Any = feed(CountedData(size, ends_at=ends_at), **{**sizes, **settings})
    made.rank_and_ranks = lambda: (rank, ranks)
    return made


def steps(feed, *, epochs: int = 3, start: int = 0) -> list[list[int]]:
    """Return the targets of each micro-batch, in order, advancing the position as training does."""
    position, found, loader = start, [], feed.train_loader()
    accumulate = feed.batches.accumulate
    while position < epochs * feed.train_size:
        feed.samples_seen = position
        batches = [batch["targets"].tolist() for batch in loader]
        found += batches
        position += len(batches) // accumulate * feed.global_batch_size
    close(loader)
    return found


def close(loader: Any) -> None:
    """End the loader's processes; the garbage collector would wait for them."""
    if loader.num_workers and loader.reader._iterator is not None:
        loader.reader._iterator._shutdown_workers()


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_at_any_step_equals_an_uninterrupted_run(workers):
    straight = steps(counted(), epochs=2)
    for step in range(len(straight)) if workers == 0 else (0, 3, 6):
        resumed = counted(num_workers=workers)
        assert steps(resumed, epochs=2, start=4 * step) == straight[step:], step


def test_ranks_and_micro_batches_share_the_same_stream():
    alone = steps(counted())
    parts = [steps(counted(rank=rank, ranks=2, micro_batch_size=1)) for rank in range(2)]
    together = [
        [*chain(*(part[i + j] for j in range(2) for part in parts))]
        for i in range(0, len(parts[0]), 2)
    ]
    assert together == alone


def test_fewer_samples_than_len_are_reported():
    with pytest.raises(
        ValueError, match=r"Counted ended at record 9 of epoch 0, but its len\(\) is 21"
    ):
        steps(counted(ends_at=9), epochs=1)


# ---------------------------------------------------------------- random numbers of a user's
# dataset
class Noisy(Dataset):
    """Draws from each global generator, as many image libraries do."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        return {"inputs": drawn, "targets": torch.tensor(index)}


class NoisyData(DataModule):
    def dataset(self, split):
        return Noisy()


@pytest.mark.parametrize("split", ["train", "val"])
def test_global_generators_are_a_samples_own(split):
    def inputs(workers):
        sizes = {"global_batch_size": 4, "eval_batch_size": 4}
        made = loader(NoisyData(), split, **sizes, num_workers=workers)
        drawn = torch.cat([batch["inputs"] for batch in made])
        close(made)
        return drawn

    first = inputs(0)
    assert len(first.unique()) == first.numel()
    assert torch.equal(first, inputs(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_change_the_models_generators(workers):
    def drawn():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def seeded(between):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        first = drawn()
        between()
        return first, drawn()

    def load():
        made = loader(NoisyData(), global_batch_size=4, num_workers=workers)
        list(made)
        close(made)

    assert seeded(load) == seeded(lambda: None)
