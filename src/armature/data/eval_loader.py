"""The loader of validation, test and prediction: each reader gets all batches, also while another
one reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from armature.data.sampler import EvalSampler
from armature.data.samples import collated, has_targets, preserved_generators
from armature.errors import ConfigError

WAIT_SECONDS = 60.0  # for samples that are read before training


class EvalLoader(DataLoader[Any]):
    """Serve a second reader from a loader of its own while the first one reads.

    A hook may iterate over the data that the loop is validating on, to draw a fixed batch.
    Persistent workers have one iterator, which a second reader would set back to its beginning, and
    the loop would see batches twice.

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


def check_padding(loader: Any, *, name: str, owner: str, trainer: Any) -> None:
    """Raise ConfigError if a rank would have no sample in a batch of an evaluation, and none can
    stand in for it.

    Args:
        name: of the loader, such as "val" or "val/0".
        owner: the data module's class.
    """
    loader = getattr(loader, "loader", loader)  # of a PrefetchLoader
    sampler: EvalSampler = loader.batch_sampler
    limit = getattr(trainer, f"limit_{name.partition('/')[0]}_batches", 1.0)
    reaches_last = limit >= (len(sampler) if isinstance(limit, int) else 1.0)
    if not (sampler.has_padding and reaches_last) or has_targets(_one_sample(loader)):
        return
    size, ranks, rest = sampler.size, sampler.ranks, sampler.size % sampler.ranks
    remedy = f"Give it at least {ranks} samples, or evaluate on at most {size} ranks."
    if size > ranks:
        remedy = (
            f"Leave {rest} of them out (torch.utils.data.Subset(dataset, range({size - rest}))), "
            "or type "
            "data.eval_batch_size=2 if the samples can be stacked or a collate_fn pads them."
        )
    raise ConfigError(
        f"data: {owner} has {size} samples for {name}, but {ranks} ranks with batches of "
        f"{sampler.batch_size} need one "
        'for each rank in every batch, and only a batch with "targets" can be filled up with '
        "samples that do not "
        f"count. {remedy}"
    )


def _one_sample(loader: DataLoader[Any]) -> Any:
    """Return a batch of one sample."""
    names = ("num_workers", "multiprocessing_context", "worker_init_fn", "timeout")
    with preserved_generators():
        (batch,) = read_batches(
            loader.dataset, [[0]], **{name: getattr(loader, name) for name in names}
        )
    return batch


def read_batches(
    samples: Any,
    batches: list[list[int]],
    *,
    num_workers: int,
    worker_init_fn: Any,
    multiprocessing_context: Any,
    timeout: float | None = None,
) -> DataLoader[Any]:
    """Return a loader of batches that reads where one with these options reads: a dataset may open
    its file there.

    Args:
        timeout: seconds after which a batch from a loader process is given up; 0: never; None:
            WAIT_SECONDS.
    """
    own: dict[str, Any] = {}
    if num_workers:
        timeout = WAIT_SECONDS if timeout is None else timeout
        own = {
            "num_workers": 1,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
        }
    return DataLoader(
        samples, batch_sampler=batches, collate_fn=collated, worker_init_fn=worker_init_fn, **own
    )
