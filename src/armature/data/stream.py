"""Data that are read from front to back, because there are too many samples to prepare or to
index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from armature.data.sampler import permuted


class Stream:
    """Base class of what `DataModule.dataset` returns if samples cannot be fetched by number.

    A subclass defines how many samples an epoch has, how to read records from a given place, and
    how to make a sample
    of a record. A resume needs the position only: reading starts there again, with any number of
    ranks and workers.
    Each rank and worker reads all records and makes samples of its share. So `records` should be
    cheap (and skip whole files by an index), and costly work (decoding, tokenizing) belongs in
    `sample`.

    Attributes:
        block: number of consecutive records that are shuffled among each other in training. Each
            rank and worker holds them in memory. 1: no shuffling. `records` itself may use another
            order in each epoch.
    """

    block: int = 1

    def __len__(self) -> int:
        """Return the samples per epoch.

        For an endless stream, return a number that no run reaches, such as 2**40.
        """
        raise NotImplementedError(f"{type(self).__name__} needs __len__: the samples of an epoch.")

    def records(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the records of an epoch from place `start`: the same at each call."""
        raise NotImplementedError(f"{type(self).__name__} needs a method records(epoch, start).")

    def sample(self, record: Any) -> dict[str, Tensor]:
        """Return {"inputs": Tensor, "targets": Tensor} for one record."""
        raise NotImplementedError(f"{type(self).__name__} needs a method sample(record).")


class Reader:
    """Fetches a stream's records by (epoch, place). Cheap if places are requested in rising order.

    If `size`, the samples per epoch, is not the whole stream, each epoch has the first epoch's
    samples. `seed` decides the order within blocks; None: no shuffling.
    """

    def __init__(self, stream: Stream, *, size: int, seed: int | None) -> None:
        self.stream, self.size, self.seed = stream, size, seed
        self.block = 1 if seed is None else stream.block
        self._records: Iterator[Any] = iter(())
        self._next = (0, -1)  # epoch and place of the next record of `_records`
        self._held: list[Any] = []
        self._held_at = (0, -1)  # epoch and place of the first record in `_held`

    def record(self, epoch: int, place: int) -> Any:
        start = place - place % self.block
        size = min(self.block, self.size - start)
        if self._held_at != (epoch, start):
            self._seek(epoch, start)
            self._held, self._held_at = [self._read() for _ in range(size)], (epoch, start)
        if size == 1:
            return self._held[0]
        (number,) = permuted(
            np.array([place - start]), size=size, seed=f"{self.seed}/{start}", epoch=epoch
        ).tolist()
        return self._held[number]

    def _seek(self, epoch: int, place: int) -> None:
        if self._next[0] != epoch or not 0 <= self._next[1] <= place:
            read = epoch if self.size == len(self.stream) else 0
            self._records, self._next = self.stream.records(read, place), (epoch, place)
        while self._next[1] < place:
            self._read()

    def _read(self) -> Any:
        epoch, place = self._next
        try:
            record = next(self._records)
        except StopIteration:
            self._next = (0, -1)
            raise ValueError(
                f"{type(self.stream).__name__} ended at record {place} of epoch {epoch}, but its "
                "len() is "
                f"{len(self.stream)}. Resuming needs the exact number of records: correct __len__."
            ) from None
        self._next = (epoch, place + 1)
        return record
