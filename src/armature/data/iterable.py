"""Make a Stream of an IterableDataset: the same samples on any number of ranks and workers, and after a resume."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as loader_worker
from typing_extensions import override

from armature.data.alike import alike
from armature.data.samples import seed_generators, seed_of, seeded
from armature.data.stream import Stream
from armature.errors import ConfigError

log = logging.getLogger(__name__)

COUNT_SECONDS = 60.0  # how long samples are counted
ENDLESS = 1 << 40  # samples that no run reaches


class IterableStream(Stream):
    """Reads an IterableDataset from its start in each epoch, and after a resume skips what the run has seen.

    Every rank and worker reads all samples and keeps its share, so the dataset must not divide them itself: it does not
    see which worker it is in. Random numbers that it draws from the global generators depend on (seed, epoch, place).
    `set_epoch(epoch)` is called before each epoch if the dataset has it.

    Args:
        limited: the samples of an epoch are limited by data.train_limit, so they need not be counted.
    """

    def __init__(self, dataset: IterableDataset[Any], *, seed: int, limited: bool = False) -> None:
        self.dataset, self.seed = dataset, seed
        self._size = ENDLESS if limited else self._count()

    @override
    def __len__(self) -> int:
        return self._size

    @override
    def records(self, epoch: int, start: int) -> Iterator[Any]:
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        samples: Iterator[Any] | None = None
        for place in range(self._size):
            seed_generators(seed_of(f"{self.seed}/iterable", epoch, place))
            try:
                with _not_in_a_worker():
                    samples = iter(self.dataset) if samples is None else samples
                    sample = next(samples)
            except StopIteration:
                return
            if place >= start:
                yield sample

    def first_records(self) -> list[Any]:
        """Return the first few records."""
        with seeded(""):
            return list(itertools.islice(self.records(0, 0), 3))

    def describe(self) -> list[Any]:
        """Return something whose repr is the same on each rank that has the same first records."""
        plain = int | float | str | bytes | np.ndarray | Tensor  # the repr of other objects may hold their address
        return [leaf if isinstance(leaf, plain) else type(leaf).__name__ for leaf in tree_leaves(self.first_records())]

    def drop_last(self, batch_size: int) -> None:
        """Leave out the samples after the last whole batch."""
        self._size -= self._size % batch_size

    def check_repeats(self) -> None:
        """Raise ConfigError if a second pass from the same random state begins with other records."""
        first, again = self.first_records(), self.first_records()
        if first and not alike(first, again):
            raise ConfigError(
                f"{type(self.dataset).__name__} yields other samples when it is read again, so a resume could not "
                "repeat them. Let __iter__ draw from torch's, NumPy's or Python's global generator, or begin a "
                "generator of its own anew, and count epochs in set_epoch(epoch) only."
            )

    @override
    def sample(self, record: Any) -> Any:
        return record

    def _count(self) -> int:
        """Return the samples of an epoch: the dataset's own number, or the number that one pass yields."""
        name = type(self.dataset).__name__
        try:
            return len(self.dataset)  # pyright: ignore[reportArgumentType]
        except TypeError:
            log.info("Counting the samples of %s. A method __len__ would spare this.", name)
        began, count = time.monotonic(), 0
        with seeded(f"{self.seed}/count"), _not_in_a_worker():
            if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
                set_epoch(0)
            for count, _ in enumerate(self.dataset, start=1):
                if count % 256 == 0 and time.monotonic() - began > COUNT_SECONDS:
                    raise ConfigError(
                        f"{name} has no __len__ and did not end within {COUNT_SECONDS:.0f} s ({count:,} samples). A "
                        "resume needs the samples per epoch: give it a method __len__, type data.train_limit=…, or "
                        "return an armature.data.stream.Stream instead, which can skip to a place (docs/data.md)."
                    )
        return count


def adapt(dataset: Any, *, seed: int, limited: bool = False) -> Any:
    """Return a Stream of an IterableDataset, and anything else as it is."""
    return IterableStream(dataset, seed=seed, limited=limited) if isinstance(dataset, IterableDataset) else dataset


@contextmanager
def _not_in_a_worker() -> Iterator[None]:
    """Let torch.utils.data.get_worker_info() be None, or a dataset would yield one worker's share only."""
    info, loader_worker._worker_info = loader_worker._worker_info, None
    try:
        yield
    finally:
        loader_worker._worker_info = info
