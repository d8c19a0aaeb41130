"""Find weights, rates and steps that users' code changes on some ranks only: training would
continue, and be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from armature.errors import ConfigError
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training.progress import completed_batches

EVERY = 1024  # steps between two checks later in a run
# of its norm that a weight may differ by
_PARTS = {torch.float64: 1e-4, torch.float32: 1e-4}
_PART_OF_SHORT = 0.02  # the same of shorter types

# name → sum, norm, and the part of the norm that may differ
Sums = Mapping[str, tuple[float, float, float]]
T = TypeVar("T")
# of an optimizer: the steps that it has made, and the rates of its groups
Update = tuple[int, list[float]]


def step_ended(trainer: L.Trainer) -> None:
    """Check after steps 1, 2, 4, 8, … and every EVERY steps: it reads each weight once."""
    step = completed_batches(trainer)
    if step % EVERY == 0 or step & (step - 1) == 0:
        check(trainer)


def check(trainer: L.Trainer) -> None:
    """Raise ConfigError if ranks that must train alike do not. Called by all ranks."""
    strategy = StrategyMixin.find(trainer)
    if strategy is None or strategy.world_size == 1:
        return
    replicated = strategy.replicated_weights() if strategy.replicates_weights else {}
    own = (
        strategy.stage,
        (strategy.gathered.order, strategy.gathered.counts),
        _updates(trainer, strategy),
        sums(replicated),
    )
    everyones = process_group.all_gather_object(own)
    _compare_gathered(trainer, strategy, [(stage, gathered) for stage, gathered, *_ in everyones])
    _compare_updates(trainer, [(stage, updates) for stage, _, updates, _ in everyones])
    weights = [of_rank for *_, of_rank in everyones]
    if (found := first_difference(weights)) is None:
        return
    name, rank = found
    first, other = (
        f"{each[name][1]:.6g}" if name in each else "missing"
        for each in (weights[0], weights[rank])
    )
    raise ConfigError(
        f"{type(trainer.lightning_module).__name__}: {name} is not the same on all ranks after "
        "step "
        f"{completed_batches(trainer)}: its norm is {first} on rank 0 and {other} on rank {rank}. "
        f"{strategy.why_unequal()}"
    )


def _beside_first(everyones: Sequence[tuple[int, T]]) -> Iterator[tuple[int, T, int, T]]:
    """Yield the first rank of each rank's stage and what it has, then the rank and what that
    has.
    """
    stages = [stage for stage, _ in everyones]
    for rank, (stage, own) in enumerate(everyones):
        first = stages.index(stage)
        yield first, everyones[first][1], rank, own


def _compare_gathered(
    trainer: L.Trainer,
    strategy: StrategyMixin,
    everyones: Sequence[tuple[int, tuple[int, list[int]]]],
) -> None:
    """Raise ConfigError if ranks have gathered other weights than the first of their stage, or in
    another order.

    Args:
        everyones: each rank's stage of the pipeline, which has units of its own, and its
            `Gathered.order` and `counts`.
    """
    for first, (expected_order, expected), rank, (order, counts) in _beside_first(everyones):
        if (order, counts) == (expected_order, expected):
            continue
        pairs = enumerate(zip(expected, counts, strict=True))
        unit = next((number for number, (one, other) in pairs if one != other), None)
        what = "modules are called in another order"
        if unit is not None and strategy.stage == everyones[rank][0]:
            what = (
                f"{strategy.gathered.names[unit]} is called {expected[unit]} times on rank "
                f"{first} and {counts[unit]}"
            )
        raise ConfigError(
            f"{type(trainer.lightning_module).__name__}: {what} on rank {rank}, after step "
            f"{completed_batches(trainer)}. Its weights are sharded, and ranks that gather "
            "different ones at the same "
            "time mix them. Decide which module is called by what all ranks know, such as "
            "self.global_step or "
            "self.trainer.strategy.broadcast(choice), or type strategy=ddp."
        )


def _updates(trainer: L.Trainer, strategy: StrategyMixin) -> list[Update]:
    """Return the steps that each optimizer has made in this process, and the learning rates of its
    groups.
    """
    return [
        (strategy.steps_made[each], [float(group.get("lr") or 0.0) for group in each.param_groups])
        for each in trainer.optimizers
    ]


def _compare_updates(trainer: L.Trainer, everyones: Sequence[tuple[int, list[Update]]]) -> None:
    """Raise ConfigError if ranks have made other numbers of steps, or with other rates, than the
    first of their stage.

    Weights that are sharded do not show it: no rank has a part of another one.

    Args:
        everyones: each rank's stage of the pipeline, whose parameter groups may be others, and its
            `_updates`.
    """
    for first, first_updates, rank, updates in _beside_first(everyones):
        for number, (expected, update) in enumerate(zip(first_updates, updates, strict=True)):
            rates = zip(expected[1], update[1], strict=False)
            unequal = next((pair for pair in rates if not _alike(*pair)), None)
            if unequal is None and expected[0] == update[0]:
                continue
            what, one, other = "number of steps", str(expected[0]), str(update[0])
            if unequal is not None:
                what, one, other = "learning rate", *(f"{rate:.6g}" for rate in unequal)
            optimizer = trainer.optimizers[number]
            which = f" (optimizer {number + 1} of {len(updates)})" if len(updates) > 1 else ""
            raise ConfigError(
                f"{type(trainer.lightning_module).__name__}: the {what} of "
                f"{type(optimizer).__name__}{which} is not "
                f"the same on all ranks after step {completed_batches(trainer)}: {one} on rank "
                f"{first} and {other} on "
                f"rank {rank}. A schedule or your code decides by a value that each rank has of "
                "its own samples. Write "
                f"self.log({_monitor(trainer, optimizer)}, …, sync_dist=True) if it is read from "
                "trainer.callback_metrics, otherwise self.all_gather(value).mean()."
            )


def _alike(rate: float, other: float) -> bool:
    return math.isclose(rate, other, rel_tol=1e-6) or (math.isnan(rate) and math.isnan(other))


def _monitor(trainer: L.Trainer, optimizer: Any) -> str:
    """Return the name of the value that a schedule of this optimizer follows, in quotes, as far as
    it is known.
    """
    own = (
        each
        for each in trainer.lr_scheduler_configs
        if getattr(each.scheduler, "optimizer", None) is optimizer
    )
    return next((f'"{each.monitor}"' for each in own if each.monitor is not None), "name")


@torch.no_grad()
def sums(weights: Mapping[str, Tensor]) -> Sums:
    """Return the sums of the weights that have values. The host waits for the device once."""
    parts, both = {}, []
    for name, weight in weights.items():
        values = torch.view_as_real(weight) if weight.is_complex() else weight
        # a class of quantized weights may not add them up
        ordinary = type(weight) in (Tensor, nn.Parameter)
        if ordinary and values.is_floating_point() and values.element_size() > 1 and values.numel():
            parts[name] = _PARTS.get(values.dtype, _PART_OF_SHORT)
            dtype = torch.promote_types(values.dtype, torch.float32)
            norm = torch.linalg.vector_norm(values, dtype=dtype)
            # at once it would copy the weight to float64
            total = values.sum(-1, dtype=dtype).sum(dtype=torch.float64)
            both.append(
                torch.stack([total, norm.double()]).to(both[0].device if both else total.device)
            )
    numbers = torch.stack(both).tolist() if both else []
    return {
        name: (total, norm, part)
        for (name, part), (total, norm) in zip(parts.items(), numbers, strict=True)
    }


def first_difference(everyones: Sequence[Sums]) -> tuple[str, int] | None:
    """Return the first weight that differs from rank 0's by more than rounding, and the rank."""
    for rank, own in enumerate(everyones):
        for name in dict.fromkeys((*everyones[0], *own)):
            if (
                name not in own
                or name not in everyones[0]
                or _differ(everyones[0][name], own[name])
            ):
                return name, rank
    return None


def _differ(one: tuple[float, float, float], two: tuple[float, float, float]) -> bool:
    largest = max(one[1], two[1])
    if not math.isfinite(largest):
        return False  # trainer.on_nan reports it
    return max(abs(one[0] - two[0]), abs(one[1] - two[1])) > max(one[2], two[2]) * largest
