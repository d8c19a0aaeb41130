"""The order of gradients in DDP's buckets, which a resumed run takes from its checkpoint.

DDP starts with one bucket in the order of the parameters. After the first step it makes new buckets in the order in
which gradients became ready. A sum over three or more ranks depends on where a gradient lies in its bucket, and a
kernel's result may depend on how it is aligned. So a resumed run starts with the buckets of the run that was stopped.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

LIMITS = (1 << 20, 25 << 20)  # bytes of the first and of each other bucket: DDP's own for buckets that it makes anew


class Buckets:
    """DDP's buckets: made in a known order, or watched in the first step until the order is known."""

    def __init__(self) -> None:
        self._order: Sequence[str] = ()
        self._ready: dict[str, None] = {}  # names of parameters, in the order in which gradients became ready
        self._reduced: dict[nn.Parameter, str] = {}  # parameters with their names, in DDP's order
        self._learns = False  # whether the next backward is the one in which DDP learns a static graph
        self._handles: list[RemovableHandle] = []

    @property
    def order(self) -> Sequence[str]:
        """Names of the parameters of the newest buckets: those without a gradient last, as DDP has them."""
        if not self._ready or self._learns:
            return self._order
        return [*self._ready, *(name for name in self._reduced.values() if name not in self._ready)]

    @order.setter
    def order(self, names: Sequence[str]) -> None:
        self._order, self._ready = names, {}

    @contextmanager
    def arranged(self, module: nn.Module) -> Iterator[None]:
        """Let a DDP that is made within this context have its buckets in `order`, if it has these parameters."""
        self.order = self.order
        original, names = dist._compute_bucket_assignment_by_size, {p: name for name, p in module.named_parameters()}

        def assign(parameters: list[Any], limits: list[int], sparse: list[bool]) -> tuple[list[Any], list[Any]]:
            self._reduced = {param: names[param] for param in parameters}
            if {*self.order} != {*self._reduced.values()}:
                return original(parameters, limits, sparse)
            index = {name: i for i, name in enumerate(self._reduced.values())}
            indices = [index[name] for name in self.order]
            buckets, sizes = original([parameters[i] for i in indices], [*LIMITS], sparse, indices)
            return buckets[::-1], sizes[::-1]  # DDP reverses them

        dist._compute_bucket_assignment_by_size = assign
        try:
            yield
        finally:
            dist._compute_bucket_assignment_by_size = original

    def watch(self, wrapped: DistributedDataParallel, *, static_graph: bool) -> None:
        """Note the order in the first backward that DDP makes its new buckets by: of a static graph the second."""
        self._stop_watching()
        self._learns, names, ready = static_graph, self._reduced, self._ready

        def note(param: Any) -> None:
            if wrapped.require_backward_grad_sync:
                ready[names[param]] = None

        self._handles = [param.register_post_accumulate_grad_hook(note) for param in names]

    def batch_begins(self) -> None:
        """End the watch if there was such a backward."""
        if self._ready and self._learns:
            self._learns = False
            self._ready.clear()
        elif self._ready:
            self._stop_watching()

    def _stop_watching(self) -> None:
        while self._handles:
            self._handles.pop().remove()
