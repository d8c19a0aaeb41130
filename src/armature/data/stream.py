"""Data that are read from front to back, because there are too many to prepare or to index them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from armature.data.sampler import permuted


class Stream:
    """What `DataModule.dataset` returns where samples cannot be fetched by number.

    A subclass says how many samples an epoch has, how to read records from a place on, and how to make a sample of
    one. A position is all that a resume needs: reading starts there again, in any number of ranks and workers. Each of
    them reads all records and makes samples of its share, so `records` should be cheap (and skip whole files by an
    index), and what is costly (decoding, tokenizing) belongs in `sample`.

    Attributes:
        block: how many records in a row are shuffled among each other in training, and held in memory for that by each
            rank and worker. 1: as they come. The records themselves may come in another order each epoch.
    """

    block: int = 1

    def __len__(self) -> int:
        """Samples an epoch. A stream without end says a number that no run reaches, such as 2**40."""
        raise NotImplementedError(f"{type(self).__name__} needs __len__: the samples of an epoch.")

    def records(self, epoch: int, start: int) -> Iterator[Any]:
        """The records of an epoch from place `start` on: the same at each call."""
        raise NotImplementedError(f"{type(self).__name__} needs a method records(epoch, start).")

    def sample(self, record: Any) -> dict[str, Tensor]:
        """{"inputs": Tensor, "targets": Tensor} of one record."""
        raise NotImplementedError(f"{type(self).__name__} needs a method sample(record).")


class Reader:
    """Fetches a stream's records by (epoch, place). Cheap as long as they are asked for in rising order.

    Args:
        size: samples an epoch. Where that is not all of the stream, each epoch has the same: those of the first.
        seed: of the order within blocks; None: as they come.
    """

    def __init__(self, stream: Stream, *, size: int, seed: int | None) -> None:
        self.stream, self.size, self.seed = stream, size, seed
        self.block = 1 if seed is None else stream.block
        self._records: Iterator[Any] = iter(())
        self._next = (0, -1)  # epoch and place of what `_records` gives next
        self._held: list[Any] = []
        self._held_at = (0, -1)  # of the first record held

    def record(self, epoch: int, place: int) -> Any:
        start = place - place % self.block
        size = min(self.block, self.size - start)
        if self._held_at != (epoch, start):
            self._go_to(epoch, start)
            self._held, self._held_at = [self._read() for _ in range(size)], (epoch, start)
        return self._held[self._shuffled(epoch, place, start, size)]

    def _shuffled(self, epoch: int, place: int, start: int, size: int) -> int:
        if size == 1:
            return 0
        return int(permuted(np.array([place - start]), size=size, seed=f"{self.seed}/{start}", epoch=epoch)[0])

    def _go_to(self, epoch: int, place: int) -> None:
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
                f"{type(self.stream).__name__} ended at record {place} of epoch {epoch}, but len() says that it has "
                f"{len(self.stream)}. Resuming needs the number that records() really gives."
            ) from None
        self._next = (epoch, place + 1)
        return record
