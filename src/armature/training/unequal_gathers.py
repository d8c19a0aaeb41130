"""Warn before training of gathers and sums over ranks that do not count as their code does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from typing_extensions import override

from armature.data.sampler import PADDING, EvalSampler
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training import agreement

log = logging.getLogger(__name__)

NAME = "all_gather"
# counts and numbers of them
OF_PROCESSES = ("world_size", "get_world_size", "global_rank", "get_rank")


class UnequalGathers(Callback):
    """Name a hook of validation that may gather one value per sample, which fails where ranks have
    unequal numbers.

    And one that divides or indexes by the number of processes, where several share samples. None is
    refused: what is
    gathered may be one number of each rank.
    """

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if process_group.rank() > 0:
            return
        _warn_of_counts(trainer, pl_module)
        if (hook := gathering_hook(pl_module)) is None:
            return
        for sampler, batches in _samplers(trainer):
            first, last = (_samples(sampler, rank, batches) for rank in (0, sampler.ranks - 1))
            if first != last:
                log.warning(
                    "%s.%s calls self.all_gather, and of %d validation samples rank 0 has %d and "
                    "rank %d has %d. A "
                    "tensor of all samples of a rank cannot be gathered then: the first validation "
                    "would end the run. "
                    "Log a torchmetrics object (CatMetric holds all values), or leave out the last "
                    "few samples. A "
                    "mean of each rank can be gathered, but counts some samples more than others.",
                    type(pl_module).__name__, hook, sampler.size, first, sampler.ranks - 1, last,
                )  # fmt: skip
                return


def _warn_of_counts(trainer: L.Trainer, module: Any) -> None:
    strategy = StrategyMixin.find(trainer)
    if strategy is None or strategy.data_size == strategy.world_size:
        return
    for method, names in agreement.names_in_methods([module]).items():
        read = [name for name in OF_PROCESSES if name in names]
        if read and (NAME in names or {"strategy", "reduce"} <= names):
            log.warning(
                "%s.%s reads %s. Of the %d processes, %d share each sample: self.all_gather, and "
                "sums by "
                "trainer.strategy.reduce, take each sample once. Divide by "
                "self.trainer.strategy.data_size, and index "
                "what was gathered by self.trainer.strategy.data_rank.",
                type(module).__name__, method, ", ".join(read), strategy.world_size,
                strategy.world_size // strategy.data_size,
            )  # fmt: skip


def gathering_hook(module: Any) -> str | None:
    """Return the user's hook of validation that mentions `all_gather`, or calls a method of its own
    that does.
    """
    mentioned = agreement.names_in_methods([module])
    for hook in (name for name in mentioned if "validation" in name):
        reached, waiting = {hook}, [hook]
        while waiting:
            names = mentioned[waiting.pop()]
            if NAME in names:
                return hook
            found = (names & mentioned.keys()) - reached
            reached |= found
            waiting += found
    return None


def _samplers(trainer: L.Trainer) -> Iterator[tuple[EvalSampler, int | float]]:
    """Yield the samplers of the validation loaders, with the batches that are used."""
    if trainer.val_dataloaders is None:
        return
    for loader, batches in zip(
        CombinedLoader(trainer.val_dataloaders).flattened, trainer.num_val_batches, strict=True
    ):
        if isinstance(sampler := getattr(loader, "batch_sampler", None), EvalSampler):
            yield sampler, batches


def _samples(sampler: EvalSampler, rank: int, batches: int | float) -> int:
    own = EvalSampler(
        sampler.size,
        batch_size=sampler.batch_size,
        rank=rank,
        ranks=sampler.ranks,
        pads=sampler.pads,
    )
    return sum(len(batch) for i, batch in enumerate(own) if i < batches and batch != [PADDING])
