"""Name values of a validation or test that each rank has logged of its own samples alone."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as L
from lightning.pytorch import Callback

from armature.parallel import process_group

log = logging.getLogger(__name__)

# less is rounding, such as that of metrics which ranks have gathered in another order
_RELATIVE = 1e-4
_SMALLEST = 1e-4  # values nearer to zero count as this


class Unsynced(Callback):
    """Compare the values that were logged without `sync_dist=True` over the ranks, after the first
    evaluation.
    """

    def __init__(self) -> None:
        self._compared: set[str] = set()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._compare(trainer, "validation", trainer.fit_loop.epoch_loop.val_loop)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compare(trainer, "test", trainer.test_loop)

    def _compare(self, trainer: L.Trainer, stage: str, loop: Any) -> None:
        if process_group.ranks() == 1 or trainer.sanity_checking or stage in self._compared:
            return
        self._compared.add(stage)
        names = {
            result.meta.name
            for result in loop._results.values()
            if result.is_tensor and result.meta.on_epoch
            if not (result.meta.sync.should or result.meta.sync.rank_zero_only)
        }
        values = trainer.callback_metrics.items()
        own = {
            key: float(value)
            for key, value in values
            if key.partition("/dataloader_idx_")[0] in names
        }
        everyones = process_group.all_gather_object(own)
        apart = [
            key for key in everyones[0] if _differ([each[key] for each in everyones if key in each])
        ]
        if apart and process_group.rank() == 0:
            first = apart[0]
            log.warning(
                "Logged in %s without sync_dist=True: %s. Each rank has the value of its own "
                "samples (%s), so that it "
                "depends on the number of ranks. checkpoint.monitor takes rank 0's; EarlyStopping "
                "and schedules take "
                'each rank\'s own. Write self.log("%s", …, sync_dist=True).',
                stage,
                ", ".join(apart),
                _shown(first, everyones),
                first.partition("/dataloader_idx_")[0],
            )


def _differ(values: list[float]) -> bool:
    return max(values) - min(values) > _RELATIVE * max(*map(abs, values), _SMALLEST)


def _shown(key: str, everyones: list[dict[str, float]]) -> str:
    values = [f"{each[key]:.4g}" for each in everyones if key in each]
    return (
        f"{key}={values[0]} on rank 0, "
        f"{', '.join(values[1:3])}{', …' if len(values) > 3 else ''} on others"
    )
