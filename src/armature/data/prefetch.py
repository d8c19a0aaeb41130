"""Batches that are on the device before the step asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Prefetched:
    """Iterates over a loader one batch ahead, and copies that batch on a stream of its own while the step computes.

    Args:
        loader: its batches lie in pinned memory, or the copies wait for the CPU.
        device: where the batches are wanted.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[Any]:
        streams = torch.get_device_module(self.device)
        aside = streams.Stream()
        ready: tuple[Any, Any] | None = None
        for batch in self.loader:
            with streams.stream(aside):
                copy = move_data_to_device(batch, self.device)
                copied = streams.Event()
                copied.record(aside)
            if ready is not None:
                yield self._handed_over(*ready)
            ready = copy, copied
        if ready is not None:
            yield self._handed_over(*ready)

    def _handed_over(self, batch: Any, copied: Any) -> Any:
        """The step's stream waits for the copy, and the memory is not reused before the step has read it."""
        current = torch.get_device_module(self.device).current_stream()
        copied.wait(current)
        if self.device.type == "cuda":
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)
        return batch
