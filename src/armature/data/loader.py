"""A loader of anybody's class that takes its samples in our order."""

import copy
import multiprocessing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader
from typing_extensions import override

from armature.data.samples import BeginWorker, Samples, collated
from armature.data.worker_signals import end_workers_at_exit


class FedLoader(DataLoader[Any]):
    """Added to the class of a loader that is fed: `dataset`, `sampler` and `batch_sampler` stay the
    user's, for hooks that read or set their attributes.

    Attributes:
        reader: a loader of the user's class, over `Samples` and our batch sampler.
        fed_by: that sampler.
    """

    reader: DataLoader[Any]
    fed_by: Any
    reading = False  # somebody has begun and not ended

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # from the first `next` on: workers copy the dataset then, and on_train_start may change it
        reader, busy = self.reader, self.reading and self.reader.persistent_workers
        if busy:  # persistent workers have one iterator, and a hook must not set the loop's back
            reader = copy.copy(reader)
            vars(reader).update(_iterator=None, persistent_workers=False)
        vars(self)["reading"] = True
        try:
            yield from reader
        finally:
            vars(self)["reading"] = busy

    @override
    def __len__(self) -> int:
        return len(self.fed_by)

    # the position is the feed's, also of loaders that keep one themselves
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing."""


def fed(
    loader: DataLoader[Any],
    samples: Samples,
    sampler: Any,
    *,
    num_workers: int,
    persistent: bool,
    pin: bool,
    predicting: bool,
    in_loop: bool,
) -> FedLoader:
    """Return a loader of the same class, with all its options, that takes samples in our order.

    Args:
        sampler: a batch sampler of keys.
        pin: keep batches in pinned memory: the host does not wait for their copies to the GPU.
        predicting: let Lightning's BasePredictionWriter find the samples of each batch.
        in_loop: Lightning must not find the user's sampler, whose epoch it would set.
    """
    if num_workers:
        # Python 3.14 forks workers from a server; without this each would import torch
        multiprocessing.set_forkserver_preload([Samples.__module__])
        end_workers_at_exit()
    if pin and num_workers:
        # DataLoader warns about loaders that are made anew each epoch. Ours is made once.
        warnings.filterwarnings("ignore", message="The combination of `DataLoader")
    reader, made = copy.copy(loader), copy.copy(loader)
    # torch lets none of these be set by name once a loader is made
    vars(reader).update(
        dataset=samples,
        batch_sampler=sampler,
        batch_size=sampler.batch_size,
        collate_fn=collated,
        num_workers=num_workers,
        timeout=loader.timeout if num_workers else 0,
        prefetch_factor=(loader.prefetch_factor or 2) if num_workers else None,
        persistent_workers=persistent and num_workers > 0,
        pin_memory=pin,
        worker_init_fn=BeginWorker(loader.worker_init_fn),
        # otherwise each start of its workers would draw from the generator that the model draws
        # from
        generator=torch.Generator().manual_seed(samples.seed),
        _iterator=None,
        _dataset_kind=0,  # map-style, also of an IterableDataset
    )
    made.__class__ = type(type(loader).__name__, (FedLoader, type(loader)), {})
    vars(made).update(
        reader=reader,
        fed_by=sampler,
        batch_size=sampler.batch_size,
        num_workers=num_workers,
        _iterator=None,
    )
    if predicting:
        shown = _IndexBatchSamplerWrapper(sampler)
        shown.seen_batch_indices = [*sampler]
        vars(made)["batch_sampler"] = shown
    elif in_loop:
        vars(made).update(batch_sampler=sampler, sampler=None)
    return made  # pyright: ignore[reportReturnType]


class Unchanged:
    """Holds a loader for predictions: Lightning builds a torch DataLoader anew, but not this."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    @classmethod
    def each(cls, loaders: Any) -> Any:
        """Return one for a loader, or for each in a dict or list."""
        if isinstance(loaders, cls):
            return loaders
        if isinstance(loaders, CombinedLoader):
            loaders = loaders.iterables
        if isinstance(loaders, Mapping):
            return {key: cls(each) for key, each in loaders.items()}
        return [*map(cls, loaders)] if isinstance(loaders, Sequence) else cls(loaders)
