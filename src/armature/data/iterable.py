"""Make a Stream of an IterableDataset: the same samples on any number of ranks and workers, and
after a resume.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as loader_worker
from typing_extensions import override

from armature.data import alike
from armature.data.samples import is_first_process, seed_generators, seed_of, seeded
from armature.data.stream import Stream
from armature.errors import ConfigError

log = logging.getLogger(__name__)

COUNT_SECONDS = 120.0  # how long samples are counted
ENDLESS = 1 << 40  # samples that no run reaches
FIRST = 3  # records that are compared


class IterableStream(Stream):
    """Reads an IterableDataset from its start in each epoch, and after a resume skips what the run
    has seen.

    Every rank and worker reads all samples and keeps its share, so the dataset must not divide them
    itself: it does not
    see which worker it is in. Random numbers that it draws from the global generators depend on
    (seed, epoch, place). `set_epoch(epoch)` is called before each epoch if the dataset has it.

    Args:
        limited: the samples of an epoch are limited by data.train_limit, so they need not be
            counted.
    """

    def __init__(self, dataset: IterableDataset[Any], *, seed: int, limited: bool = False) -> None:
        self.dataset, self.seed = dataset, seed
        self._counted = False
        self._size = ENDLESS if limited else self._length()
        self.begun = Begun(type(dataset).__name__)

    @override
    def __len__(self) -> int:
        return self._size

    @override
    def records(self, epoch: int, start: int) -> Iterator[Any]:
        return self.begun.watched(
            self._records(epoch, self._size), epoch=epoch, start=start, size=self._size
        )

    def _records(self, epoch: int, limit: int) -> Iterator[Any]:
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        samples: Iterator[Any] | None = None
        for place in range(limit):
            seed_generators(seed_of(f"{self.seed}/iterable", epoch, place))
            try:
                with _not_in_a_worker():
                    samples = iter(self.dataset) if samples is None else samples
                    sample = next(samples)
            except StopIteration:
                return
            yield sample

    def first_records(self, number: int = FIRST) -> list[Any]:
        """Return the first few records."""
        with seeded(""):
            return list(itertools.islice(self._records(0, self._size), number))

    def drop_last(self, batch_size: int) -> None:
        """Leave out the samples after the last whole batch."""
        self._size -= self._size % batch_size

    def check_repeats(self) -> None:
        """Raise ConfigError if a second pass of training data begins with other records, or has
        more or fewer.

        Evaluations read epoch 0 alone, which may be another number of samples than in other epochs.
        """
        first, again = self.first_records(), self.first_records()
        if first and not alike.alike(first, again):
            raise ConfigError(
                f"{type(self.dataset).__name__} yields other samples when it is read again, so a "
                "resume could not "
                "repeat them. Let __iter__ draw from torch's, NumPy's or Python's global "
                "generator, or begin a "
                "generator of its own anew, and count epochs in set_epoch(epoch) only."
            )
        if self._counted and (again := self._count(1)) != self._size:
            raise ConfigError(
                f"{type(self.dataset).__name__} has no __len__, and yields {self._size:,} samples "
                "in one pass and "
                f"{again:,} in the next. A resume finds its place by counting, so each epoch has "
                "as many: give it a "
                "method __len__ and yield that number in each pass (for a sample that is left out, "
                "yield the next "
                "one), or type data.train_limit=… for training data that have at least as many in "
                "each pass."
            )

    @override
    def sample(self, record: Any) -> Any:
        return record

    def _length(self) -> int:
        """Return the samples of an epoch: the dataset's own number, or the number that a pass
        yields.
        """
        try:
            return len(self.dataset)  # pyright: ignore[reportArgumentType]
        except TypeError:
            log.info(
                "Counting the samples of %s, those for training twice. A method __len__ would "
                "spare this.",
                type(self.dataset).__name__,
            )
        self._counted = True
        return self._count(0)

    def _count(self, epoch: int) -> int:
        """Return the samples of one pass, read as each pass is."""
        began, count, name = time.monotonic(), 0, type(self.dataset).__name__
        with seeded(""):
            for count, _ in enumerate(self._records(epoch, ENDLESS), start=1):
                if count % 256 == 0 and time.monotonic() - began > COUNT_SECONDS:
                    raise ConfigError(
                        f"{name} has no __len__ and did not end within {COUNT_SECONDS:.0f} s "
                        f"({count:,} samples). A "
                        "resume needs the samples per epoch: give it a method __len__, type "
                        "data.train_limit=…, or "
                        "return an armature.data.stream.Stream instead, which can skip to a place "
                        "(docs/data.md)."
                    )
        return count


class Begun:
    """How the newest pass of the training loop has begun, to be compared after a resume, which
    reads it once more.

    The loader's processes share it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # passes begun, epoch and digest of the newest; of the one that a resume reads once more:
        # known, epoch, digest
        self._newest, self._saved = (
            torch.zeros(3, dtype=torch.int64).share_memory_() for _ in range(2)
        )

    def state_dict(self) -> dict[str, int]:
        passes, epoch, digest = self._newest.tolist()
        return {"epoch": epoch, "digest": digest} if passes else {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state:
            self._saved[:] = torch.tensor([1, state["epoch"], state["digest"]])

    def watched(
        self, records: Iterator[Any], *, epoch: int, start: int, size: int
    ) -> Iterator[Any]:
        """Yield the records from a place on."""
        first: list[int] = []
        watches = is_first_process()
        for place, record in enumerate(records):
            if watches and place < FIRST:
                first.append(alike.digest(record))
                if place == min(FIRST, size) - 1:
                    self._note(epoch, alike.digest(first))
            if place >= start:
                yield record

    def _note(self, epoch: int, digest: int) -> None:
        self._newest[:] = torch.tensor([int(self._newest[0]) + 1, epoch, digest])
        known, saved_epoch, saved = self._saved.tolist()
        if not known or saved_epoch != epoch:
            return
        self._saved[0] = 0
        if digest != saved and os.environ.get("RANK", "0") == "0":
            log.warning(
                "data: epoch %d of %s does not begin with the samples that it had before the run "
                "was stopped. If "
                "__iter__ draws from what training changes (a replay buffer), the resumed run is "
                "as an undisturbed one "
                "only if the buffer is saved (state_dict of the data module) and each sample is "
                "drawn when it is "
                "yielded, not all of them when the epoch begins.",
                epoch, self.name,
            )  # fmt: skip


def adapt(dataset: Any, *, seed: int, limited: bool = False) -> Any:
    """Return a Stream of an IterableDataset, and anything else as it is."""
    return (
        IterableStream(dataset, seed=seed, limited=limited)
        if isinstance(dataset, IterableDataset)
        else dataset
    )


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
