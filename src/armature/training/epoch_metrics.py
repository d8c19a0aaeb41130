"""Save and restore what metrics have collected so far in an epoch, on any number of ranks.

`self.log(..., on_epoch=True)` collects values in objects that Lightning's own checkpoints leave
out, and torchmetrics' objects do not save their states.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min
from typing_extensions import override

from armature.parallel.whole_weights import whole

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
# by key of the collection, or by name of the metric in the module
Facts = dict[str, dict[str, Any]]
# of equal values, each is that value
_ALIKE = (dim_zero_max, dim_zero_min, dim_zero_mean, torch.max, torch.min)
_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "metric_attribute",
)


class Results(_ResultCollection):
    """Lightning's, with whole values of sharded weights: rank 0 alone reads them, for the bar.

    Attributes:
        restored: keys of the values that `restore` has set and no hook has logged again. The first
            one that does decides how, since that may depend on the layout, and continues from them.
        continues: whether the values of this epoch are such ones.
    """

    restored: frozenset[str] = frozenset()
    continues: bool = False

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        if fx is not None and self.continues:
            return  # Lightning resets a hook's values in the first batch of a start
        self.continues = False
        super().reset(metrics, fx)

    @override
    def log(self, fx: str, name: str, value: Any, **settings: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        key = f"{fx}.{name}"
        before = self.pop(key) if key in self.restored else None
        self.restored -= {key}
        super().log(fx, name, whole(value), **settings)  # pyright: ignore[reportAttributeAccessIssue]
        own = self[key]
        earlier = before.metric_state if before is not None and own.meta.on_epoch else {}
        for state in own.metric_state.keys() & earlier:
            newest = getattr(own, state)  # on the CPU, if a hook logs it from there
            parts = torch.stack([earlier[state].to(newest.device), newest])
            setattr(own, state, _reduction(own, state)(parts))


@contextmanager
def without_logging(*owners: Any) -> Iterator[None]:
    """Let `self.log` of a module, and of callbacks, do nothing."""
    # Lightning sets `log` on callbacks: the module's method
    own = [vars(each).get("log") for each in owners]
    for each in owners:
        vars(each)["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for each, log_of_its_own in zip(owners, own, strict=True):
            vars(each).pop("log")
            if log_of_its_own is not None:
                vars(each)["log"] = log_of_its_own


def collect(results: Results) -> Facts:
    """Return, by key, what this rank has logged in this epoch: how, the newest value, and what was
    collected: a sum (with its number of samples), maximum or minimum.

    The state of a metric object is one of `metric_states`.
    """
    return {
        key: {
            "meta": {name: getattr(metric.meta, name) for name in _META},
            "reduce_fx": metric.meta.reduce_fx.__name__,
            "sync": metric.meta.sync.should,
            "rank_zero_only": metric.meta.sync.rank_zero_only,
            "newest": copied(metric._forward_cache),
            "state": copied(metric.metric_state),  # empty for an object
            "updates": metric.update_count,
        }
        for key, metric in results.items()
        if not metric.has_reset
    }


def restore(
    results: Results, of_ranks: list[Facts], module: nn.Module, strategy: Any, **ranks: Any
) -> None:
    """Let a collection hold what `collect` returned on all ranks, as far as this rank continues
    from it, and nothing else.

    Args:
        ranks: see `_continued`.
    """
    metrics, device = dict(_metrics(module)), strategy.root_device
    chosen, takes = _continued(of_ranks, **ranks)
    results.clear()
    results.restored = frozenset()
    for key in dict.fromkeys(chain(*chosen)):
        found = [facts[key] for facts in chosen if key in facts]
        how = found[0]
        value = torch.zeros(()) if how["state"] else metrics.get(how["meta"]["metric_attribute"])
        if value is None:
            continue
        results.log(
            value=value.to(device),
            **how["meta"],
            reduce_fx=how["reduce_fx"],
            rank_zero_only=how["rank_zero_only"],
            sync_dist_fn=strategy.reduce,
            batch_size=1,
        )
        own = results[key]
        if how["state"]:
            _set_state(own, key, found, takes=takes)
        own._forward_cache, own.has_reset = copied(how["newest"]), False
        own.meta.sync.should = how["sync"]
    results.to(device)
    results.restored, results.continues = frozenset(results), bool(results)


def metric_states(module: nn.Module, *, evaluated: Any = MappingProxyType({})) -> Facts:
    """Return the state of each metric object of the module, on the CPU, by its name in the module.

    Args:
        evaluated: the results of a validation. Lightning resets the objects that it has logged at
            its very end, after all hooks; a validation that is stopped starts anew. So their states
            are as after a reset.
    """
    ended = {
        id(result.value)
        for result in evaluated.values()
        if not (result.is_tensor or result.has_reset)
    }
    for each in module.modules():
        if isinstance(each, MetricCollection):
            # brings the states of metrics that are computed together up to date
            list(each.items())
    metrics = {
        name: _reset(metric) if id(metric) in ended else metric for name, metric in _metrics(module)
    }
    return {
        name: {"state": copied(_state_of(metric)), "updates": metric.update_count}
        for name, metric in metrics.items()
    }


def _reset(metric: Metric) -> Metric:
    metric = copy.deepcopy(metric)
    metric.reset()
    return metric


def _continued(
    of_ranks: list[Facts],
    *,
    rank: int = 0,
    saved_data_ranks: Sequence[int] = (0,),
    data_ranks: Sequence[int] = (0,),
) -> tuple[list[Facts], bool]:
    """Return what a rank continues from, of one rank or of several that are to be combined, and
    whether it does: others start from nothing, but for extremes and means.

    Args:
        saved_data_ranks, data_ranks: each rank's place on the data axis, when the checkpoint was
            saved and now.
    """
    if saved_data_ranks == data_ranks:
        return [of_ranks[rank]], True
    # ranks that share a part of the data have collected the same
    places = sorted(set(saved_data_ranks))
    chosen, place = [of_ranks[saved_data_ranks.index(each)] for each in places], data_ranks[rank]
    if len({*data_ranks}) < len(chosen):
        return chosen, place == 0
    # each continues one rank's
    return chosen[place : place + 1] or chosen, place < len(chosen)


def restore_states(module: nn.Module, of_ranks: list[Facts], **ranks: Any) -> None:
    """Set the state of the module's metric objects; on fewer ranks than the checkpoint's, to what
    all had collected. Without `ranks` (see `_continued`): to what this one had.
    """
    _set_lengths(module, {name for facts in of_ranks for name in facts})
    chosen, takes = _continued(of_ranks, **ranks)
    for name, metric in _metrics(module):
        found = [facts[name] for facts in chosen if name in facts]
        if found:
            _set_state(metric, name, found, takes=takes)


def _set_lengths(module: nn.Module, saved: set[str]) -> None:
    """Let each MetricTracker have as many metric objects as it had.

    `increment` adds one to its list.
    """
    for name, tracker in [*module.named_modules()]:
        if not isinstance(tracker, MetricTracker):
            continue
        before = f"{name}.".removeprefix(".")
        steps = {
            each.removeprefix(before).partition(".")[0] for each in saved if each.startswith(before)
        }
        # one is the object that the others are copies of
        while steps and tracker.n_steps < len(steps) - 1:
            tracker.increment()
        while steps and tracker.n_steps > len(steps) - 1:
            delattr(tracker, str(tracker.n_steps))  # `del tracker[-1]` would rename the first one


def _set_state(metric: Metric, name: str, found: list[dict[str, Any]], *, takes: bool) -> None:
    """Set a metric's state to what one rank, or several, had collected.

    Args:
        takes: whether this rank continues from that; others start from nothing, but for extremes
            and means.
    """
    metric.reset()
    states = [one["state"] for one in found if one["updates"]] or [found[0]["state"]]
    lost = []
    for key, value in states[0].items():
        reduction, values = _reduction(metric, key), [state[key] for state in states]
        if isinstance(value, list):
            new = [item for items in values for item in items]
        elif callable(reduction) and len(values) > 1:
            new = reduction(torch.stack(values))
        else:
            new = value
            lost += [key] * (key in metric._reductions and len(values) > 1)
        if takes or key not in metric._reductions or reduction in _ALIKE:
            setattr(metric, key, copied(new, metric.device))
    metric._update_count = sum(one["updates"] for one in found)
    if lost and takes:
        log.warning(
            "%s: %s of several ranks cannot be combined. It continues with what one of %d ranks "
            "had collected, so its "
            "values of this epoch differ. Resume on as many ranks as before, or on more.",
            name, ", ".join(lost), len(states),
        )  # fmt: skip


def _reduction(metric: Any, key: str) -> Any:
    """Return how values of a state are combined. Lightning's results call all of them sums."""
    how = metric.meta.reduce_fx if hasattr(metric, "meta") else None
    return how if how in _ALIKE else metric._reductions.get(key)


def _metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    return ((name, m) for name, m in module.named_modules() if isinstance(m, Metric))


def _state_of(metric: Metric) -> dict[str, Any]:
    """Return the states, and further tensors that some metrics keep, such as MinMaxMetric's
    extremes.
    """
    others = {
        key: value
        for key, value in vars(metric).items()
        # a running mean's place of the next value in the window
        if (isinstance(value, Tensor) and key[0] != "_") or key == "_num_vals_seen"
    }
    return others | metric.metric_state


def copied(value: Any, device: torch.device = _CPU) -> Any:
    """Return a copy of a tensor, or of the tensors in a list or dict."""
    return apply_to_collection(value, Tensor, lambda each: each.detach().clone().to(device))
