"""The training loader: the loop takes the batches from the run's position on, and hooks take whole
epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override


class TrainLoader(DataLoader[Any]):
    """Serve the training loop from the run's position on, and hooks the whole epoch from a loader
    of their own.

    Hooks iterate over `trainer.train_dataloader`, for nearest neighbors or statistics. A second
    iterator of this loader would reset the workers that serve the loop, and so end its epoch.

    Args:
        asked_by_loop: returns whether it is the training loop that begins to iterate.
        whole_epoch: returns a new loader of this rank's share of the epoch.
    """

    def __init__(
        self,
        *args: Any,
        asked_by_loop: Callable[[], bool],
        whole_epoch: Callable[[], DataLoader[Any]],
        **kwargs: Any,
    ) -> None:
        self.asked_by_loop, self.whole_epoch = asked_by_loop, whole_epoch
        super().__init__(*args, **kwargs)

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _begin_late(super().__iter__) if self.asked_by_loop() else iter(self.whole_epoch())


def _begin_late(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Iterate from the first `next` on: workers copy the dataset then, and `on_train_epoch_start`
    may change it.
    """
    yield from begin()


def of_its_own(loader: Any) -> str:
    """Return what is wrong with a training loader that a data module of ours has not made."""
    return (
        f"train_dataloader returns a {type(loader).__name__} of its own, which knows neither the "
        "ranks nor the "
        "position of a resume. Return samples from dataset(split) and batches from "
        "collate_fn(samples) instead, or "
        "derive the class from LightningDataModule, whose loaders are adapted (docs/data.md)."
    )
