"""The order of gradients in DDP's buckets, which a resumed run takes from its checkpoint.

DDP starts with one bucket, in the order of the parameters. After its first step (of a static graph:
the second) it makes new ones, in the order in which gradients became ready. A sum over three or
more ranks depends on where a gradient lies in its bucket, and a kernel's result may depend on how
it is aligned. So a resumed run has the buckets of the run that was stopped from its first step on,
and keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override


class OrderedDDP(DistributedDataParallel):
    """DDP whose buckets have a given order if that has the parameters that it reduces.

    Args:
        order: names of parameters, the same on all ranks.
    """

    reduced: dict[nn.Parameter, str]  # parameters and their names, in the reducer's order
    is_ordered = False
    _order: Sequence[str]

    def __init__(self, module: nn.Module, *, order: Sequence[str], **options: Any) -> None:
        object.__setattr__(self, "_order", order)  # nn.Module is not initialized yet
        super().__init__(module, **options)
        if self.is_ordered:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    @override
    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        names = {param: name for name, param in self.module.named_parameters()}
        params, sparse = super()._build_params_for_reducer()
        self.reduced = {param: names[param] for param in params}
        self.is_ordered = sorted(self.reduced.values()) == sorted(self._order)
        if not self.is_ordered:
            return params, sparse
        place = {name: i for i, name in enumerate(self._order)}
        pairs = sorted(zip(params, sparse, strict=True), key=lambda pair: place[names[pair[0]]])
        self.reduced = {param: names[param] for param, _ in pairs}
        return [*self.reduced], [is_sparse for _, is_sparse in pairs]


class BucketOrder:
    """The order of the newest buckets: known, or noted in the backward by which DDP makes them."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._reduced: Sequence[str] = ()
        self._ready: list[str] = []
        # whether this backward is noted; whether it is a static graph's first
        self._notes = self._learns = False
        self._handles: list[RemovableHandle] = []

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters, those without a gradient last, as DDP has them; empty until they
        are known.
        """
        return self._names

    @names.setter
    def names(self, names: object) -> None:
        is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        self._names = names if is_list else ()  # pyright: ignore[reportAttributeAccessIssue]

    def watch(self, wrapped: OrderedDDP, *, static_graph: bool) -> None:
        """Note the order in which gradients become ready, unless the buckets have a known one."""
        self.stop_watching()
        if wrapped.is_ordered:
            return
        self._learns, self._reduced = static_graph, [*wrapped.reduced.values()]

        def note(param: Any) -> None:
            if self._notes:
                self._ready.append(wrapped.reduced[param])

        self._handles = [
            param.register_post_accumulate_grad_hook(note) for param in wrapped.reduced
        ]

    def backward_begins(self, *, reduces: bool) -> None:
        """Called before each backward that goes through the strategy. Others are not DDP's."""
        self._notes = bool(self._handles) and reduces
        self._ready.clear()

    def backward_ends(self) -> None:
        if not self._notes:
            return
        self._notes = False
        if self._learns:
            self._learns = False
            return
        # DDP counts the last of several of a reentrant checkpoint
        ready = dict.fromkeys(self._ready[::-1])
        self._names = [*[*ready][::-1], *(name for name in self._reduced if name not in ready)]
        self.stop_watching()

    def stop_watching(self) -> None:
        self._notes = False
        while self._handles:
            self._handles.pop().remove()
