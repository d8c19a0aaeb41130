"""Data that are read from front to back, because there are too many samples to prepare or to
index.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Stream:
    """Base class of what `DataModule.dataset` returns if samples cannot be fetched by number.

    A subclass defines how many samples an epoch has, how to read records from a given place, in an
    order of its own for each epoch, and how to make a sample of a record. A resume needs the
    position only: reading starts there again, with any number of ranks and workers. Each rank and
    worker reads all records and makes samples of its share. So `records` should be cheap (and skip
    whole files by an index), and costly work (decoding, tokenizing) belongs in `sample`.
    """

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
    samples.
    """

    def __init__(self, stream: Stream, *, size: int) -> None:
        self.stream, self.size = stream, size
        self._records: Iterator[Any] = iter(())
        self._place = (-1, 0)  # epoch and place of the record that was read last

    def record(self, epoch: int, place: int) -> Any:
        if self._place[0] != epoch or self._place[1] > place:
            read = epoch if self.size == len(self.stream) else 0
            self._records, self._place = self.stream.records(read, place), (epoch, place - 1)
        for number in range(self._place[1] + 1, place + 1):
            try:
                self._record = next(self._records)
            except StopIteration:
                owner = getattr(self.stream, "dataset", self.stream)
                raise ValueError(
                    f"{type(owner).__name__} ended at record {number} of epoch {epoch}, but an "
                    f"epoch has {len(self.stream)}, by its __len__ or the pass that counted them. "
                    f"Resuming needs the exact number: correct __len__, or type data.train_limit="
                    f"{number}, with which each epoch has the first one's samples."
                ) from None
            self._place = (epoch, number)
        return self._record
