"""A loader of anybody's class that takes its samples in our order, and copies batches to the device
before the step asks for them.
"""

import copy
import multiprocessing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from armature.data.samples import BeginWorker, Samples, collated
from armature.data.worker_signals import end_workers_at_exit

# hooks that see a batch off the device
BEFORE_DEVICE = ("on_before_batch_transfer", "transfer_batch_to_device")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FedLoader(DataLoader[Any]):
    """Added to the class of a loader that is fed: `dataset`, `sampler` and `batch_sampler` stay the
    user's, for hooks that read or set their attributes.

    Attributes:
        reader: a loader of the user's class, over `Samples` and our batch sampler.
        fed_by: that sampler.
        device: where batches are copied one ahead, or None.
    """

    reader: DataLoader[Any]
    fed_by: Any
    device: torch.device | None
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
            batches = iter(reader)
            yield from batches if self.device is None else _ahead(batches, self.device)
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
    device: torch.device | None,
    ahead: bool,
    predicting: bool,
    in_loop: bool,
) -> FedLoader:
    """Return a loader of the same class, with all its options, that takes samples in our order.

    Args:
        sampler: a batch sampler of keys.
        ahead: whether a batch may be copied to the device before the step before it has ended.
        predicting: let Lightning's BasePredictionWriter find the samples of each batch.
        in_loop: Lightning must not find the user's sampler, whose epoch it would set.
    """
    if num_workers:
        # Python 3.14 forks workers from a server; without this each would import torch
        multiprocessing.set_forkserver_preload([Samples.__module__])
        end_workers_at_exit()
    pin = device is not None and device.type == "cuda"
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
        reader=reader, fed_by=sampler, device=device if pin and ahead else None,
        batch_size=sampler.batch_size, num_workers=num_workers, _iterator=None,
    )  # fmt: skip
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


def copies_ahead(owners: list[Any], *, ours: bool, workers: bool) -> bool:
    """Return whether batches may be read and copied one ahead.

    A dataset of users, such as a replay buffer, may change with each step (worker processes read
    ahead anyway), and code of the owners may want batches before they are on the device: hooks do,
    and a step that takes `dataloader_iter`.
    """
    steps = [step for own in owners for name in STEPS if (step := getattr(own, name, None))]
    return (
        (workers or ours)
        and not any(is_overridden(name, own) for own in owners for name in BEFORE_DEVICE)
        and not any(is_param_in_hook_signature(s, "dataloader_iter", explicit=True) for s in steps)
    )


def _ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch on a separate stream while the step before it computes.

    They must be in pinned memory: from other memory, the copies would block the CPU.
    """
    streams = torch.get_device_module(device)
    copy_stream = streams.Stream()
    ready: tuple[Any, Any] | None = None
    for batch in batches:
        # Tensors that only an object's own `to` knows cannot be recorded below, and this copy may
        # get their memory: it waits for the steps so far, which read them. The next step overlaps
        # with it.
        copy_stream.wait_stream(streams.current_stream())
        with streams.stream(copy_stream):
            copied = move_data_to_device(batch, device)
            done = streams.Event()
            done.record(copy_stream)
        if ready is not None:
            yield _synchronized(*ready, device)
        ready = copied, done
    if ready is not None:
        yield _synchronized(*ready, device)


def _synchronized(batch: Any, copied: Any, device: torch.device) -> Any:
    """Return the batch.

    The step's stream waits for the copy, and the memory stays until the step reads it.
    """
    current = torch.get_device_module(device).current_stream()
    copied.wait(current)
    for leaf in tree_leaves(batch):
        # not a PackedSequence's sizes, which stay on the CPU; nor sparse tensors, which torch
        # cannot record
        if isinstance(leaf, Tensor) and leaf.is_cuda and leaf.layout == torch.strided:
            leaf.record_stream(current)
    return batch
