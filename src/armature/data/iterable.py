"""Make a Stream of an IterableDataset: the same samples on any number of ranks and workers, and
after a resume.
"""

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as loader_worker
from typing_extensions import override

from armature.data.samples import digest, preserved_generators, seed_generators, seed_of
from armature.data.stream import Stream
from armature.errors import ConfigError

log = logging.getLogger(__name__)

COUNT_SECONDS = 120.0  # how long samples are counted
ENDLESS = 1 << 40  # samples that no run reaches


class IterableStream(Stream):
    """Reads an IterableDataset from its start in each epoch, and after a resume skips what the run
    has seen.

    Every rank and worker reads all samples and keeps its share, so the dataset must not divide them
    itself: it does not see which worker it is in. Random numbers that it draws from the global
    generators depend on (seed, epoch, place). `set_epoch(epoch)` is called before each epoch if the
    dataset has it.

    Args:
        limited: the samples of an epoch are limited by data.train_limit, so they need not be
            counted.
    """

    def __init__(self, dataset: IterableDataset[Any], *, seed: int, limited: bool) -> None:
        self.dataset, self.seed = dataset, seed
        self._size = ENDLESS
        if not limited:
            try:
                self._size = len(dataset)  # pyright: ignore[reportArgumentType]
            except TypeError:
                log.info(
                    "Counting the samples of %s in one pass, which each later one must yield. A "
                    "method __len__ would spare this; an endless one needs it, or "
                    "data.train_limit=….",
                    type(dataset).__name__,
                )
                with preserved_generators():
                    self._size = self._count()
                    begins = {digest([*itertools.islice(self._records(0), 8)]) for _ in range(2)}
                if len(begins) > 1:
                    log.warning(
                        "%s yields other samples in a second pass. Ranks, loader processes and "
                        "resumes divide them by place: if their order differs, some are used twice "
                        "and some not at all. Count epochs in set_epoch(epoch), and make "
                        "generators anew from a seed in __iter__ (webdataset: seed=0 for shuffle "
                        "and WebDataset), or draw from the global ones, which are seeded.",
                        type(dataset).__name__,
                    )

    @override
    def __len__(self) -> int:
        return self._size

    def _count(self) -> int:
        began, count = time.monotonic(), 0
        for count, _ in enumerate(self._records(0), 1):
            if count % 256 == 0 and time.monotonic() - began > COUNT_SECONDS:
                raise ConfigError(
                    f"{type(self.dataset).__name__} has no __len__ and did not end within "
                    f"{COUNT_SECONDS:.0f} s ({count:,} samples). A resume needs the samples per "
                    "epoch: give it a method __len__, type data.train_limit=…, or return an "
                    "armature.data.stream.Stream, which can skip to a place (docs/data.md)."
                )
        return count

    @override
    def records(self, epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(self._records(epoch), start, None)

    def _records(self, epoch: int) -> Iterator[Any]:
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        samples = None
        for place in range(self._size):
            seed_generators(seed_of(f"{self.seed}/iterable", epoch, place))
            try:
                with _not_in_a_worker():
                    samples = iter(self.dataset) if samples is None else samples
                    sample = next(samples)
            except StopIteration:
                return
            yield sample

    def drop_last(self, batch_size: int) -> None:
        """Leave out the samples after the last whole batch."""
        self._size -= self._size % batch_size

    @override
    def sample(self, record: Any) -> Any:
        return record


@contextmanager
def _not_in_a_worker() -> Iterator[None]:
    """Let torch.utils.data.get_worker_info() be None, or a dataset would yield one worker's share
    only.
    """
    info, loader_worker._worker_info = loader_worker._worker_info, None
    try:
        yield
    finally:
        loader_worker._worker_info = info
