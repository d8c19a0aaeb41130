"""Restore Lightning's counters after a resume at any step, also on other ranks or with another micro-batch size."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from armature.parallel import process_group
from armature.training import epoch_metrics
from armature.training.loops import EpochLoop, FitLoop


class RestoreProgress(Callback):
    """Set Lightning's counters from the optimizer steps and samples seen, instead of from its checkpoint.

    Lightning's checkpoint counts micro-batches, whose size depends on the layout, and its loops guess from half-updated
    counts where the checkpoint was saved. After a stop at an epoch's end they guess wrong: hooks are skipped, and later
    stops are counted in the wrong epoch.

    A checkpoint always holds whole steps. If it was saved at an epoch's last step, the end-of-epoch hooks and
    schedulers run after the resume. Values that `self.log` has collected in the epoch so far are restored, too.
    """

    def __init__(self) -> None:
        self._epoch = 0  # when the checkpoint was saved
        self._metrics: dict[str, float] = {}
        self._logged: list[epoch_metrics.EpochMetrics] = []  # of each rank
        self._restored: epoch_metrics.EpochMetrics = {}
        self._trainer: Trainer | None = None

    @property
    def state_key(self) -> str:
        return "CountOn"  # its name in checkpoints of the first version

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        assert self._trainer is not None
        metrics = {name: float(value) for name, value in self._trainer.callback_metrics.items()}
        collected = epoch_metrics.collect(_epoch_loop(self._trainer)._results)
        logged = process_group.all_gather_object(collected)
        return {"epoch": self._trainer.current_epoch, "metrics": metrics, "logged": logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch, self._metrics = state_dict["epoch"], state_dict["metrics"]
        self._logged = state_dict["logged"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        if not step:
            return
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        epoch, position = divmod(data.samples_seen, data.train_size)
        if data.global_batch_size > data.train_size:  # a step is an epoch to Lightning
            epoch, position = step, 0
        batches = position // data.global_batch_size * trainer.accumulate_grad_batches
        closing = not batches and self._epoch < epoch
        if closing:
            epoch, batches = epoch - 1, int(trainer.num_training_batches)
        fit_loop, epoch_loop = trainer.fit_loop, _epoch_loop(trainer)
        assert isinstance(fit_loop, FitLoop)
        fit_loop.restore_progress(epoch=epoch, started=bool(batches))
        epoch_loop.restore_progress(step=step, batches=batches, closing=closing)
        self._restore_metrics(trainer, closing=closing, mid_epoch=bool(batches) and not closing)
        if batches:  # schedulers that follow a metric step after everything that a step saves
            epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)

    def _restore_metrics(self, trainer: Trainer, *, closing: bool, mid_epoch: bool) -> None:
        known = trainer.callback_metrics.keys()  # of the validation that the checkpoint owed
        trainer.callback_metrics.update({n: torch.tensor(v) for n, v in self._metrics.items() if n not in known})
        own = epoch_metrics.for_rank(self._logged, rank=trainer.global_rank, ranks=trainer.world_size)
        results, strategy = _epoch_loop(trainer)._results, trainer.strategy
        if closing:
            self._restored = own
            epoch_metrics.restore(results, own, reduce=strategy.reduce, device=strategy.root_device)
        elif mid_epoch:
            epoch_metrics.resume(results, own)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _epoch_loop(trainer).close_epoch()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch_metrics.clear(_epoch_loop(trainer)._results, self._restored)
        self._restored = {}


def _epoch_loop(trainer: Trainer) -> EpochLoop:
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop, EpochLoop)
    return loop
