"""Look at a plain data module's test loaders before training, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as L
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

_DEPTH = 3  # of objects in objects: module, dataset, its base, the base's transform
_MOST = 1000
_NOT_SETTINGS = (
    "builtins",
    "threading",
    "queue",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "logging",
)


def each(loaders: Any) -> list[Any]:
    """Return the loaders themselves: one, or those in a list or dict."""
    return tree_leaves(getattr(loaders, "iterables", loaders))


def endless(loaders: Any) -> bool:
    """Return whether a dataset does not know how many samples it has, so that counting would read
    all of it.
    """
    datasets = [getattr(loader, "dataset", None) for loader in each(loaders)]
    return any(
        isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__")
        for dataset in datasets
    )


def complete(loaders: Any) -> Any:
    """Return the loaders, or None if one has no samples yet: `setup("test")` may make them."""
    for loader in each(loaders):
        dataset = getattr(loader, "dataset", None)
        empty = dataset is None or (hasattr(dataset, "__len__") and len(dataset) == 0)
        if isinstance(loader, DataLoader) and empty:
            return None
    return loaders


class Before:
    """The attributes of a data module, of what training reads, and of objects among them: a test
    may set others.

    `test_dataloader` sets a transform of a shared dataset, or from which side a tokenizer pads.
    """

    def __init__(self, module: Any, read: Mapping[str, Any]) -> None:
        found: dict[int, Any] = {}
        level = [
            module,
            *(getattr(loader, "dataset", None) for loader in tree_leaves([*read.values()])),
        ]
        for _ in range(_DEPTH):
            level = [value for value in level if id(value) not in found and _has_attributes(value)]
            found |= {id(value): value for value in level[: _MOST - len(found)]}
            level = [value for owner in level for value in _values(owner)]
        self._attributes = [(owner, {**vars(owner)}) for owner in found.values()]

    def put_back(self) -> None:
        for owner, attributes in self._attributes:
            now = vars(owner)
            for name in [name for name in now if name not in attributes]:
                del now[name]
            now.update(
                {
                    name: value
                    for name, value in attributes.items()
                    if now.get(name, self) is not value
                }
            )


def _has_attributes(value: Any) -> bool:
    own = type(value)
    known = (
        issubclass(own, type | nn.Module | L.Trainer)
        or own.__module__.partition(".")[0] in _NOT_SETTINGS
    )
    return not known and isinstance(getattr(value, "__dict__", None), dict)


def _values(owner: Any) -> Iterator[Any]:
    for value in vars(owner).values():
        inner = (
            [*value.values()]
            if type(value) is dict
            else value
            if type(value) in (list, tuple)
            else ()
        )
        yield from (value, *(inner[:_MOST]))
