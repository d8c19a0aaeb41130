"""Copies batches to the device before the step asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils._pytree import tree_leaves

# hooks that see a batch off the device
BEFORE_DEVICE = ("on_before_batch_transfer", "transfer_batch_to_device")
TRANSFER_HOOKS = (*BEFORE_DEVICE, "on_after_batch_transfer")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def reads_ahead(data: Any, *, workers: bool) -> bool:
    """Return whether a batch may be read before the step before it has ended.

    A dataset of users, such as a replay buffer, may change with each step. Worker processes read
    ahead anyway.
    """
    return workers or type(data).__module__.startswith("armature.")


def sees_batches_off_device(owner: Any) -> bool:
    """Return whether a module's or data module's own code gets batches before they are on the
    device.

    Hooks do, and a step that takes `dataloader_iter`: it moves its batches itself.
    """
    if any(is_overridden(name, owner) for name in BEFORE_DEVICE):
        return True
    steps = [step for name in STEPS if (step := getattr(owner, name, None)) is not None]
    return any(is_param_in_hook_signature(step, "dataloader_iter", explicit=True) for step in steps)


class UnchangedLoader:
    """Passes on a loader's batches.

    Lightning builds a torch DataLoader for predictions anew, but not this. `batch_sampler` is where
    its BasePredictionWriter looks for the samples of each batch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batch_sampler = _IndexBatchSamplerWrapper(loader.batch_sampler)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.batch_sampler.seen_batch_indices = [*self.loader.batch_sampler]
        return iter(self.loader)


class PrefetchLoader:
    """Iterates over a loader one batch ahead, and copies that batch on a separate stream while the
    step computes.

    The loader must yield batches in pinned memory: from other memory, the copies would block the
    CPU. Other attributes,
    such as `dataset` and `batch_size`, are the loader's.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __getattr__(self, name: str) -> Any:
        # a copy has no loader yet; Lightning would end the workers
        if name == "loader" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[Any]:
        return self._ahead(iter(self.loader))  # now: the loader asks who begins to iterate

    def _ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        streams = torch.get_device_module(self.device)
        copy_stream = streams.Stream()
        ready: tuple[Any, Any] | None = None
        for batch in batches:
            # Tensors that only an object's own `to` knows cannot be recorded below, and this copy
            # may get their memory: it waits for the steps so far, which read them. The next step
            # overlaps with it.
            copy_stream.wait_stream(streams.current_stream())
            with streams.stream(copy_stream):
                copy = move_data_to_device(batch, self.device)
                copied = streams.Event()
                copied.record(copy_stream)
            if ready is not None:
                yield self._synchronized(*ready)
            ready = copy, copied
        if ready is not None:
            yield self._synchronized(*ready)

    def _synchronized(self, batch: Any, copied: Any) -> Any:
        """Return the batch.

        The step's stream waits for the copy, and the memory stays until the step reads it.
        """
        current = torch.get_device_module(self.device).current_stream()
        copied.wait(current)
        if self.device.type == "cuda":
            for leaf in tree_leaves(batch):
                # not a PackedSequence's sizes, which stay on the CPU; nor sparse tensors, which
                # torch cannot record
                if (
                    isinstance(leaf, Tensor)
                    and leaf.device.type == "cuda"
                    and leaf.layout == torch.strided
                ):
                    leaf.record_stream(current)
        return batch
