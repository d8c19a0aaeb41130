"""Save and restore what `self.log(..., on_epoch=True)` has collected so far in an epoch.

Lightning keeps these values in objects that its own checkpoints leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

EpochMetrics = dict[str, dict[str, Any]]
_META = ("fx", "name", "prog_bar", "logger", "on_step")


def collect(results: Any) -> EpochMetrics:
    """Return, by key, this rank's sum (with its number of samples), maximum or minimum, and how it was logged."""
    return {
        key: {name: getattr(metric.meta, name) for name in _META}
        | {
            "value": float(metric.value),
            "samples": int(getattr(metric, "cumulated_batch_size", 0)),
            "reduce_fx": metric.meta.reduce_fx.__name__,
            "sync": metric.meta.sync.should,
            "rank_zero_only": metric.meta.sync.rank_zero_only,
        }
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }


def for_rank(of_ranks: list[EpochMetrics], *, rank: int, ranks: int) -> EpochMetrics:
    """Return the values that a rank had. If the number of ranks has changed, every rank takes those of rank 0."""
    if len(of_ranks) == ranks:
        return of_ranks[rank]
    return of_ranks[0] if of_ranks else {}


def resume(results: Any, before: EpochMetrics) -> None:
    """Continue each value from where it was, when it is logged for the first time after the resume."""
    update, left = results.update_metrics, dict(before)

    def update_from_there(key: str, value: Any, batch_size: int) -> None:
        if key in left:
            _restore(results[key], left.pop(key))
        update(key, value, batch_size)

    results.update_metrics = update_from_there


def restore(results: Any, before: EpochMetrics, *, reduce: Callable[..., Any], device: torch.device) -> None:
    """Restore the values as if they had been logged: if no batch is left, the end of the epoch needs them."""
    for key, facts in before.items():
        meta = _Metadata(**{name: facts[name] for name in _META}, on_epoch=True, reduce_fx=facts["reduce_fx"])
        meta.sync = _Sync(fn=reduce, _should=facts["sync"], rank_zero_only=facts["rank_zero_only"])
        metric = _ResultMetric(meta, is_tensor=True).to(device)
        _restore(metric, facts)
        metric._update_count = 1
        results[key] = metric


def clear(results: Any, before: EpochMetrics) -> None:
    """Discard restored values after their epoch, so that they are logged anew with the caller's own settings."""
    vars(results).pop("update_metrics", None)
    for key in before:
        results.pop(key, None)


def _restore(metric: Any, facts: dict[str, Any]) -> None:
    metric.value = torch.full_like(metric.value, facts["value"])
    if metric.meta.is_mean_reduction:
        metric.cumulated_batch_size = torch.full_like(metric.cumulated_batch_size, facts["samples"])
