"""Compare what ranks must have alike, at each validation and save, and at the end of training.

Ranks that decide or change something by their own samples train on, and wrongly. One collective of
small values finds that before it is saved.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from armature.data import samples
from armature.errors import ConfigError
from armature.parallel import gradients, process_group
from armature.strategies.base import StrategyMixin
from armature.training import user_state
from armature.training.progress import completed_batches

log = logging.getLogger(__name__)

# of its norm that a tensor may differ by; 64-bit sums differ by their order of addition alone
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
TOLERANCE_OF_SHORT = 0.02  # bf16, fp16
SHOWN = 5
REMEDY = (
    "A rank has changed or decided it by its own samples or random numbers, or a gradient was not "
    "reduced (make parameters in __init__, call self.manual_backward(loss)). Reduce over the ranks "
    "(self.all_gather(value).mean(0), self.log(…, sync_dist=True) for what a schedule reads), or "
    "draw once and send it (self.trainer.strategy.broadcast)."
)
# name → sum, norm, and the part of the norm that may differ
Sums = Mapping[str, tuple[float, float, float]]


class SameEverywhere(Callback):
    """End the run if weights, steps, rates or data differ between ranks that must have them alike.

    Buffers and logged values that differ are named once: a rank may have its own.
    """

    def __init__(self) -> None:
        self._batch: str | None = None  # digest of the first batch, until it is compared
        self._trained = False
        self._named: set[str] = set()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._trained and process_group.ranks() > 1:
            self._batch = digest(batch)
        self._trained = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.check(trainer)

    # DDP then gives all ranks the buffers of rank 0: a save behind a validation finds them alike
    on_validation_start = on_train_end

    def check(self, trainer: L.Trainer) -> None:
        """Compare the ranks. All of them call it.

        Raises:
            ConfigError: they differ.
        """
        if process_group.ranks() == 1:
            return
        strategy = StrategyMixin.of(trainer)
        several_alike = strategy.world_size == strategy.data_size
        saved = nn.Module.state_dict(strategy.module) if several_alike else {}
        buffers = {n: each for n, each in strategy.module.named_buffers() if n in saved}
        own = {
            "stage": strategy.stage,
            "data rank": strategy.data_rank,
            "batch": self._batch,
            "facts": _facts(trainer, strategy),
            "weights": sums(strategy.replicated_weights() if strategy.replicates_weights else {}),
            "buffers": sums(buffers),
            "logged": _unsynced(trainer),
        }
        self._batch = None
        everyones = process_group.all_gather_object(own)
        if found := [*differences(everyones)]:
            more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
            raise ConfigError(
                f"{type(trainer.lightning_module).__name__}: not the same on all ranks after step "
                f"{completed_batches(trainer)}: {'; '.join(found[:SHOWN])}{more}. {REMEDY}"
            )
        if process_group.rank() == 0:
            self._warn(everyones)

    def _warn(self, everyones: Sequence[Mapping[str, Any]]) -> None:
        for kind, text in {
            "buffers": "Each resume gives all ranks the buffers of rank 0. Reduce what your code "
            "puts there (self.all_gather(value).mean(0)).",
            "logged": "They were logged without sync_dist=True, so each rank has the value of its "
            "own samples: checkpoint.monitor takes rank 0's, EarlyStopping and schedules each "
            "rank's own.",
        }.items():
            new = [text for name, text in unlike(everyones, kind) if name not in self._named]
            self._named |= {name for name, _ in unlike(everyones, kind)}
            if new:
                log.warning("Ranks have different values: %s. %s", "; ".join(new[:SHOWN]), text)
        if found := repeated(everyones):
            log.warning(
                "%s: each then learns the same. Let your dataset give other samples for other "
                "numbers, and no generator of one seed on all ranks.",
                found,
            )


def differences(everyones: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what differs, between which ranks, and by how much."""
    stages = [own["stage"] for own in everyones]
    for rank, own in enumerate(everyones):
        first = stages.index(own["stage"])  # stages of a pipeline have optimizers of their own
        expected = everyones[first]["facts"]
        for name in dict.fromkeys((*expected, *own["facts"])):
            one, other = expected.get(name), own["facts"].get(name)
            rates = isinstance(one, float) and isinstance(other, float)
            close = rates and math.isclose(one, other, rel_tol=1e-6)
            if f"{one}" != f"{other}" and not close:  # as text: NaN is NaN
                yield f"{name} is {one} on rank {first} and {other} on rank {rank}"
    yield from (text for _, text in unlike(everyones, "weights"))
    places = [own["data rank"] for own in everyones]
    for rank, own in enumerate(everyones):
        first = places.index(own["data rank"])
        if everyones[first]["batch"] != own["batch"]:
            yield f"the first batch of rank {rank} is not that of rank {first}, which shares it"


def repeated(everyones: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which ranks have begun with the same samples, instead of with their own."""
    first: dict[str, int] = {}
    for rank, own in enumerate(everyones):
        other = first.setdefault(own["batch"], rank) if own["batch"] else rank
        if everyones[other]["data rank"] != own["data rank"]:
            return f"ranks {other} and {rank} have begun with the same samples"
    return None


def unlike(everyones: Sequence[Mapping[str, Any]], kind: str) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors that a rank has unlike rank 0, and how."""
    first = everyones[0][kind]
    for rank, own in enumerate(everyones):
        for name in dict.fromkeys((*first, *own[kind])):
            one, other = first.get(name), own[kind].get(name)
            if one is None or other is None or _differ(one, other):
                norms = ("missing" if each is None else f"{each[1]:.6g}" for each in (one, other))
                yield name, f"{name} ({' on rank 0, '.join(norms)} on rank {rank})"


def _differ(one: tuple[float, float, float], other: tuple[float, float, float]) -> bool:
    largest = max(one[1], other[1])
    if not math.isfinite(largest):
        return False  # trainer.on_nan reports it
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) > max(one[2], other[2]) * largest


def _facts(trainer: L.Trainer, strategy: StrategyMixin) -> dict[str, Any]:
    facts: dict[str, Any] = {"the global step": completed_batches(trainer)}
    for number, optimizer in enumerate(trainer.optimizers):
        name = f"{type(optimizer).__name__} {number}"
        facts[f"the number of steps of {name}"] = strategy.steps_made[optimizer]
        for group, options in enumerate(optimizer.param_groups):
            facts[f"the learning rate of {name}, group {group}"] = float(options.get("lr") or 0.0)
    return facts


def _unsynced(trainer: L.Trainer) -> Sums:
    """Return the values of validations that were logged without `sync_dist=True`."""
    results: Any = trainer.fit_loop.epoch_loop.val_loop._results.values()
    names = {
        each.meta.name
        for each in results
        if each.is_tensor and each.meta.on_epoch
        if not (each.meta.sync.should or each.meta.sync.rank_zero_only)
    }
    return {
        key: (float(value), abs(float(value)), 1e-4)
        for key, value in trainer.callback_metrics.items()
        if key.partition("/dataloader_idx_")[0] in names
    }


@torch.no_grad()
def sums(tensors: Mapping[str, Tensor]) -> Sums:
    """Return sum and norm of whole tensors of numbers. The host waits for the device once."""
    parts, both = {}, []
    for name, tensor in tensors.items():
        # a class of quantized weights may not add them up
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            continue
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not values.numel() or (values.is_floating_point() and values.element_size() == 1):
            continue
        if not values.is_floating_point():
            values = values.double()
        parts[name] = TOLERANCE.get(values.dtype, TOLERANCE_OF_SHORT)
        dtype = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, dtype=dtype).double()
        # at once it would copy the tensor to float64
        total = values.sum(-1, dtype=dtype).sum(dtype=torch.float64)
        both.append(torch.stack([total, norm]).to(both[0].device if both else total.device))
    numbers = torch.stack(both).tolist() if both else []
    return {
        name: (total, norm, part)
        for (name, part), (total, norm) in zip(parts.items(), numbers, strict=True)
    }


def digest(batch: Any) -> str:
    """Return a fingerprint of a batch's tensors; nothing if only its own class knows them."""
    parts = [gradients.local_part(each) for each in samples.tensors(batch)]
    return user_state.digest(parts).hex() if parts else ""
