"""torchmetrics objects over ranks: each sample counts once, and ranks may hold unequal numbers of
values.

torchmetrics gathers from all ranks, also from those that compute the same samples. It gathers a
list that it does not concatenate value by value, so that a rank with more values than another would
wait for ever, and tensors of one shape only.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from armature.parallel import process_group


def combine_from(ranks: Sequence[int], module: nn.Module) -> None:
    """Let a module's metric objects combine the states of these ranks, unless they were given a
    group or a function of their own.

    Args:
        ranks: one for each part of the data.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.dist_sync_fn or metric.process_group:
            continue
        metric.dist_sync_fn = partial(_gather, metric, ranks)
        if len(ranks) == 1:  # this rank has all samples
            metric.distributed_available_fn = bool


def _gather(
    metric: Metric, ranks: Sequence[int], value: Tensor, group: Any = None
) -> Sequence[Tensor]:
    """Return a state's tensors of these ranks: torchmetrics' `dist_sync_fn`.

    It is called for each tensor of a list. The first call gathers the whole list, so each rank
    needs at least one value in a list that torchmetrics does not concatenate before.
    """
    lists = [state for state in metric.metric_state.values() if isinstance(state, list)]
    own = next((state for state in lists if any(each is value for each in state)), None)
    if own is None:  # torchmetrics passes a tensor without elements for an empty list
        own = [value] if value.numel() else []
    elif value is not own[0]:
        return []
    of_ranks = process_group.all_gather_object([each.detach().cpu() for each in own])
    return [each.to(value.device) for rank in ranks for each in of_ranks[rank]] or [value]
