"""Find weights that users' code changes on some ranks only: training goes on without a word, and is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from armature.errors import ConfigError
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training.progress import completed_batches

EVERY = 1024  # steps between two checks later in a run
_PARTS = {torch.float64: 1e-4, torch.float32: 1e-4}  # of its norm that a weight may differ by; of shorter types:
_PART_OF_SHORT = 0.02

Sums = Mapping[str, tuple[float, float, float]]  # name → sum, norm, and the part of the norm that may differ


def step_ended(trainer: L.Trainer) -> None:
    """Check after steps 1, 2, 4, 8, … and every EVERY steps: it reads each weight once."""
    step = completed_batches(trainer)
    if step % EVERY == 0 or step & (step - 1) == 0:
        check(trainer)


def check(trainer: L.Trainer) -> None:
    """Raise ConfigError if ranks that must hold the same weights do not. Called by all ranks."""
    strategy = StrategyMixin.find(trainer)
    if strategy is None or strategy.world_size == 1:
        return
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        _check_rates(trainer)
    if not strategy.replicates_weights:
        return
    everyones = process_group.all_gather_object(sums(strategy.replicated_weights()))
    if (found := first_difference(everyones)) is None:
        return
    name, rank = found
    first, other = (f"{each[name][1]:.6g}" if name in each else "missing" for each in (everyones[0], everyones[rank]))
    raise ConfigError(
        f"{type(trainer.lightning_module).__name__}: {name} is not the same on all ranks after step "
        f"{completed_batches(trainer)}: its norm is {first} on rank 0 and {other} on rank {rank}. "
        f"{strategy.why_unequal()}"
    )


def _check_rates(trainer: L.Trainer) -> None:
    """Raise ConfigError if schedules that follow a metric have seen other values on other ranks, and acted on them."""
    following = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    rates = [float(group["lr"]) for each in trainer.optimizers for group in each.param_groups]
    seen = [str(getattr(config.scheduler, "best", None)) for config in following]
    everyones = process_group.all_gather_object((rates, seen))
    for rank, (its_rates, its_seen) in enumerate(everyones):
        both = zip(everyones[0][0], its_rates, strict=False)
        first, other = next((pair for pair in both if pair[0] != pair[1]), (0.0, 0.0))
        if first != other and its_seen != everyones[0][1]:  # stages of a pipeline may have other groups
            monitors = [str(config.monitor) for config in following]
            raise ConfigError(
                f"{type(trainer.lightning_module).__name__}: the learning rate is not the same on all ranks after step "
                f"{completed_batches(trainer)}: {first:.6g} on rank 0 and {other:.6g} on rank {rank}. A schedule "
                f"follows {', '.join(monitors)}, of which each rank has the value of its own samples. Write "
                f'self.log("{monitors[0]}", …, sync_dist=True).'
            )


@torch.no_grad()
def sums(weights: Mapping[str, Tensor]) -> Sums:
    """Return the sums of the weights that have values. The host waits for the device once."""
    parts, both = {}, []
    for name, weight in weights.items():
        values = torch.view_as_real(weight) if weight.is_complex() else weight
        ordinary = type(weight) in (Tensor, nn.Parameter)  # a class of quantized weights may not add them up
        if ordinary and values.is_floating_point() and values.element_size() > 1 and values.numel():
            parts[name] = _PARTS.get(values.dtype, _PART_OF_SHORT)
            dtype = torch.promote_types(values.dtype, torch.float32)
            norm = torch.linalg.vector_norm(values, dtype=dtype)
            total = values.sum(-1, dtype=dtype).sum(dtype=torch.float64)  # at once it would copy the weight to float64
            both.append(torch.stack([total, norm.double()]).to(both[0].device if both else total.device))
    numbers = torch.stack(both).tolist() if both else []
    return {name: (total, norm, part) for (name, part), (total, norm) in zip(parts.items(), numbers, strict=True)}


def first_difference(everyones: Sequence[Sums]) -> tuple[str, int] | None:
    """Return the first weight that differs from rank 0's by more than rounding, and the rank."""
    for rank, own in enumerate(everyones):
        for name in dict.fromkeys((*everyones[0], *own)):
            if name not in own or name not in everyones[0] or _differ(everyones[0][name], own[name]):
                return name, rank
    return None


def _differ(one: tuple[float, float, float], two: tuple[float, float, float]) -> bool:
    largest = max(one[1], two[1])
    if not math.isfinite(largest):
        return False  # trainer.on_nan reports it
    return max(abs(one[0] - two[0]), abs(one[1] - two[1])) > max(one[2], two[2]) * largest
