"""torchmetrics objects over ranks: each sample counts once, and ranks may hold unequal numbers of values.

torchmetrics gathers from all ranks, also from those that compute the same samples. It gathers lists value by value, so
that a rank with more values than another waits for ever, and one without any sends another type and shape.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from armature.parallel import process_group

_combine = Metric._sync_dist
_END = object()  # of a list that is shorter than others


def combine_from(ranks: Sequence[int]) -> None:
    """Let metric objects combine the states of these ranks, unless they were given a group or a function of their own.

    Args:
        ranks: one for each part of the data.
    """

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        of_ranks = gather_all_tensors(value, group)
        return of_ranks if group is not None else [of_ranks[rank] for rank in ranks]

    def gather_lists(lists: Any, group: Any = None) -> list[Any]:
        of_ranks = process_group.all_gather_object(lists, group=group)
        return of_ranks if group is not None else [of_ranks[rank] for rank in ranks]

    def combine(self: Metric, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        if dist_sync_fn is not gather_all_tensors:
            _combine(self, dist_sync_fn, process_group)
            return
        group = process_group or self.process_group
        lists = {name: value for name in self._reductions if isinstance(value := getattr(self, name), list)}
        if not lists or _equal({name: _calls(self, name) for name in lists}, group):
            _combine(self, gather, group)
            return
        of_ranks = gather_lists({name: [_to(item, "cpu") for item in value] for name, value in lists.items()}, group)
        merged = {
            name: (_chain if self._reductions[name] == dim_zero_cat else _merge)([each[name] for each in of_ranks])
            for name in lists
        }
        merged = {name: values for name, values in merged.items() if all(isinstance(v, Tensor) for v in values)}
        reductions, device = self._reductions, "cpu" if self.compute_on_cpu else self.device
        self._reductions = {name: reduction for name, reduction in reductions.items() if name not in merged}
        try:
            _combine(self, gather, group)
        finally:
            self._reductions = reductions
        for name, reduction in reductions.items():
            if values := [_to(value, device) for value in merged.get(name, ())]:
                setattr(self, name, reduction(values) if callable(reduction) else values)

    Metric._sync_dist = combine
    if (detection := sys.modules.get("torchmetrics.detection.mean_ap")) is not None:  # masks are no tensors
        detection.MeanAveragePrecision._gather_tuple_list = staticmethod(
            lambda masks, group=None: _merge(gather_lists(masks, group))
        )


def _calls(metric: Metric, name: str) -> int:
    """Return how often torchmetrics would gather for a list: once for one that it concatenates before."""
    values = getattr(metric, name)
    return min(len(values), 1) if metric._reductions[name] == dim_zero_cat else len(values)


def _equal(calls: dict[str, int], group: dist.ProcessGroup | None) -> bool:
    return all(each == calls for each in process_group.all_gather_object(calls, group=group))


def _merge(lists: Sequence[list[Any]]) -> list[Any]:
    """Return all items: the first of each list, then the second of each, as torchmetrics orders them."""
    return [item for items in zip_longest(*lists, fillvalue=_END) for item in items if item is not _END]


def _chain(lists: Sequence[list[Any]]) -> list[Any]:
    """Return all items of the first list, then those of the second: so torchmetrics orders what it concatenates."""
    return [item for items in lists for item in items]


def _to(item: Any, device: Any) -> Any:
    return item.detach().to(device) if isinstance(item, Tensor) else item
