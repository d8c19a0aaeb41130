"""The loader of validation, test and prediction: each reader gets all batches, also while another one reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override


class EvalLoader(DataLoader[Any]):
    """Serve a second reader from a loader of its own while the first one reads.

    A hook may iterate over the data that the loop is validating on, to draw a fixed batch. Persistent workers have one
    iterator, which a second reader would set back to its beginning, and the loop would see batches twice.

    Args:
        another: returns a new loader of the same batches.
    """

    def __init__(self, *args: Any, another: Callable[[], DataLoader[Any]], **kwargs: Any) -> None:
        self._another = another
        self._reader: Callable[[], Iterator[Any] | None] = lambda: None  # a weak reference
        self._unread = 0
        super().__init__(*args, **kwargs)

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.persistent_workers:
            return super().__iter__()
        if self._unread and self._reader() is not None:
            return iter(self._another())
        self._unread = len(self)
        reader = self._counted(super().__iter__())
        self._reader = weakref.ref(reader)
        return reader

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._unread -= 1
            yield batch
