"""Look at a plain data module's test loaders before training, and leave no trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset


def datasets(loaders: Any) -> list[Any]:
    """Return the datasets of loaders: of one, or of a list or dict of them."""
    return [getattr(loader, "dataset", None) for loader in tree_leaves(getattr(loaders, "iterables", loaders))]


def endless(loaders: Any) -> bool:
    """Return whether a dataset does not know how many samples it has, so that counting would read all of it."""
    return any(isinstance(each, IterableDataset) and not hasattr(each, "__len__") for each in datasets(loaders))


def complete(loaders: Any) -> Any:
    """Return the loaders, or None if one has no samples yet: `setup("test")` may make them."""
    sizes = [1 if isinstance(each, IterableDataset) else len(each) for each in datasets(loaders)]
    return loaders if all(sizes) else None


class Before:
    """The attributes of a data module and of the datasets that training reads: `test_dataloader` may set others."""

    def __init__(self, module: Any, read: Mapping[str, Any]) -> None:
        owners = [module]
        for each in tree_leaves([*read.values()]):
            dataset = getattr(each, "dataset", None)
            while dataset is not None and all(dataset is not owner for owner in owners):
                owners.append(dataset)
                dataset = getattr(dataset, "dataset", None)  # of a Subset
        self._attributes = [(owner, {**vars(owner)}) for owner in owners if hasattr(owner, "__dict__")]

    def put_back(self) -> None:
        for owner, attributes in self._attributes:
            vars(owner).clear()
            vars(owner).update(attributes)
