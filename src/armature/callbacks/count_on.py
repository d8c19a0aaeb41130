"""Goes on counting after a resume with another number of ranks or another micro-batch size."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class CountOn(Callback):
    """Lightning's checkpoint counts micro-batches; what they are worth depends on the layout that saved it.

    Both counts, of the epoch and of the run, are set from the optimiser steps and the samples that were seen.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.global_step:
            return
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        # 1 if saved at a batch's end, which counts that batch as completed only when it goes on
        under_way = progress.current.processed - progress.current.completed
        in_epoch = trainer.datamodule.batches_seen_in_epoch  # pyright: ignore[reportAttributeAccessIssue]
        for count, seen in (
            (progress.current, in_epoch),
            (progress.total, trainer.global_step * trainer.accumulate_grad_batches),
        ):
            count.ready = count.started = count.processed = seen
            count.completed = seen - under_way
