"""torchmetrics objects over ranks: each sample counts once, and ranks may hold unequal numbers of
values.

torchmetrics gathers from all ranks, also from those that compute the same samples. It gathers lists
value by value, so that a rank with more values than another waits for ever, and one without any
sends another type and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from armature.parallel import process_group

_combine = Metric._sync_dist
_END = object()  # of a list that is shorter than others


def combine_from(ranks: Sequence[int]) -> None:
    """Let metric objects combine the states of these ranks, unless they were given a group or a
    function of their own.

    Args:
        ranks: one for each part of the data.
    """

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        of_ranks = gather_all_tensors(value, group or process_group.group_for(value))
        return of_ranks if group is not None else [of_ranks[rank] for rank in ranks]

    def combine(
        self: Metric,
        dist_sync_fn: Callable[..., Any] = gather_all_tensors,
        process_group: Any = None,
    ) -> None:
        if dist_sync_fn is not gather_all_tensors:
            _combine(self, dist_sync_fn, process_group)
            return
        if hasattr(self, "_gather_tuple_list"):  # of masks, which are combined here like all lists
            self._gather_tuple_list = _unchanged
        group = process_group or self.process_group
        if group is None and len(ranks) == 1:  # has all samples
            return
        lists = {
            name: value
            for name in self._reductions
            if isinstance(value := getattr(self, name), list)
        }
        if not lists or _equal({name: _calls(self, name) for name in lists}, group):
            _combine(self, gather, group)
            return
        merged = _gather_lists(self, lists, group, None if group is not None else ranks)
        reductions = self._reductions
        self._reductions = {
            name: reduction for name, reduction in reductions.items() if name not in merged
        }
        try:
            _combine(self, gather, group)
        finally:
            self._reductions = reductions
        for name, values in merged.items():
            reduction: Any = reductions[name]
            reduces = (
                callable(reduction)
                and values
                and all(isinstance(value, Tensor) for value in values)
            )
            setattr(self, name, reduction(values) if reduces else values)

    Metric._sync_dist = combine


def _gather_lists(
    metric: Metric, lists: dict[str, list[Any]], group: Any, ranks: Sequence[int] | None
) -> dict[str, list[Any]]:
    """Return each list with the items of these ranks.

    None: of all. Tensors are where ranks hold them, CPU or GPU.
    """
    own = {
        name: (_devices(values) <= {"cpu"}, _to(values, "cpu")) for name, values in lists.items()
    }
    of_ranks = process_group.all_gather_object(own, group=group)
    of_ranks = of_ranks if ranks is None else [of_ranks[rank] for rank in ranks]
    merged = {}
    for name in lists:
        join = _chain if metric._reductions[name] == dim_zero_cat else _merge
        on_cpu = all(of_rank[name][0] for of_rank in of_ranks)
        merged[name] = _to(
            join([of_rank[name][1] for of_rank in of_ranks]), "cpu" if on_cpu else metric.device
        )
    return merged


def _unchanged(masks: list[Any], process_group: Any = None) -> list[Any]:
    return masks


def _calls(metric: Metric, name: str) -> int | None:
    """Return how often torchmetrics would gather for a list: once for one that it concatenates
    before.

    None: it would leave out the list, or gather in the order of what is inside: not all items are
    tensors.
    """
    values = getattr(metric, name)
    if not all(isinstance(value, Tensor) for value in values):
        return None
    return min(len(values), 1) if metric._reductions[name] == dim_zero_cat else len(values)


def _equal(calls: dict[str, int | None], group: dist.ProcessGroup | None) -> bool:
    of_ranks = process_group.all_gather_object(calls, group=group)
    return all(each == calls and None not in each.values() for each in of_ranks)


def _merge(lists: Sequence[list[Any]]) -> list[Any]:
    """Return all items: the first of each list, then the second of each, as torchmetrics orders
    them.
    """
    return [
        item for items in zip_longest(*lists, fillvalue=_END) for item in items if item is not _END
    ]


def _chain(lists: Sequence[list[Any]]) -> list[Any]:
    """Return all items of the first list, then those of the second: so torchmetrics orders what it
    concatenates.
    """
    return [item for items in lists for item in items]


def _to(items: Any, device: Any) -> Any:
    return apply_to_collection(
        items, Tensor, lambda item: item.detach().to(device), allow_frozen=True
    )


def _devices(items: Any) -> set[str]:
    found: set[str] = set()
    apply_to_collection(items, Tensor, lambda item: found.add(item.device.type), allow_frozen=True)
    return found
