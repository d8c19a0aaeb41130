"""Goes on counting after a resume, at any step, also with another number of ranks or another micro-batch size."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import RestartStage as EpochStage
from lightning.pytorch.loops.training_epoch_loop import RestartStage as BatchStage

from armature.parallel import process_group
from armature.training import epoch_metrics


class RestoreProgress(Callback):
    """Sets Lightning's counters from the optimizer steps and samples that were seen, instead of from its checkpoint.

    That holds micro-batches, which are worth what the layout made of them, and the loops guess from half-updated counts
    at which place the checkpoint was saved. After a stop at an epoch's end they guess wrong: hooks are left out, and
    later stops are counted in the wrong epoch.

    A checkpoint is always of a whole step. An epoch whose last step it is of is still to be closed: its end is reached
    after the resume, with the hooks and schedulers that belong there. What `self.log` has gathered in the epoch so far
    goes on, too.
    """

    def __init__(self) -> None:
        self._epoch = 0  # when the checkpoint was saved
        self._metrics: dict[str, float] = {}
        self._logged: list[epoch_metrics.EpochMetrics] = []  # of each rank
        self._put_back: epoch_metrics.EpochMetrics = {}
        self._trainer: Trainer | None = None

    @property
    def state_key(self) -> str:
        return "CountOn"  # its name in the checkpoints of the first version

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        assert self._trainer is not None
        metrics = {name: float(value) for name, value in self._trainer.callback_metrics.items()}
        gathered = process_group.all_gather_object(epoch_metrics.collect(_parts(self._trainer)[2]._results))
        return {"epoch": self._trainer.current_epoch, "metrics": metrics, "logged": gathered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epoch, self._metrics = state_dict["epoch"], state_dict["metrics"]
        self._logged = state_dict["logged"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, accumulate = trainer.global_step, trainer.accumulate_grad_batches
        if not step:
            return
        data, _, loop = _parts(trainer)
        epoch, place = divmod(data.samples_seen, data.train_size)
        if data.global_batch_size > data.train_size:  # a step is an epoch to Lightning
            epoch, place = step, 0
        in_epoch = place // data.global_batch_size * accumulate
        closing = not in_epoch and self._epoch < epoch
        if closing:
            epoch, in_epoch = epoch - 1, int(trainer.num_training_batches)
        _count_epochs(trainer, epoch=epoch, under_way=bool(in_epoch))
        _count_batches(trainer, in_epoch=in_epoch, closing=closing)

        known = trainer.callback_metrics.keys()  # of the validation that the checkpoint owed
        earlier = {name: torch.tensor(value) for name, value in self._metrics.items() if name not in known}
        trainer._logger_connector._callback_metrics.update(earlier)
        own = epoch_metrics.for_rank(self._logged, rank=trainer.global_rank, ranks=trainer.world_size)
        if closing:
            self._put_back = own
            epoch_metrics.restore(
                loop._results, own, reduce=trainer.strategy.reduce, device=trainer.strategy.root_device
            )
        elif in_epoch:
            epoch_metrics.resume(loop._results, own)
        if in_epoch:  # schedulers that follow a metric come after all that is saved in a step
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _, _, loop = _parts(trainer)
        loop.restarting = False  # where nothing but the end of the epoch was left
        loop.reset_restart_stage()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch_metrics.clear(_parts(trainer)[2]._results, self._put_back)
        self._put_back = {}


def _count_epochs(trainer: Trainer, *, epoch: int, under_way: bool) -> None:
    _, fit, _ = _parts(trainer)
    for count in (fit.epoch_progress.total, fit.epoch_progress.current):
        count.ready = count.started = epoch + under_way
        count.processed = count.completed = epoch
    fit._restart_stage = EpochStage.RESTARTED_MID_EPOCH if under_way else EpochStage.NONE
    fit._restarting = False  # else the schedulers that are due at the end of this epoch would be left out
    fit._last_train_dl_reload_epoch = epoch


def _count_batches(trainer: Trainer, *, in_epoch: int, closing: bool) -> None:
    """Micro-batches of the epoch that are done; with `closing`, all of them."""
    _, _, loop = _parts(trainer)
    step, progress = trainer.global_step, loop.batch_progress
    in_the_middle = bool(in_epoch) and not closing
    # the loop takes a batch that is not completed for a save at its end: it completes it, and goes on with the next one
    for count, seen in ((progress.current, in_epoch), (progress.total, step * trainer.accumulate_grad_batches)):
        count.ready = count.started = count.processed = seen
        count.completed = seen - in_the_middle
    progress.is_last_batch = closing
    loop._batches_that_stepped = step - in_the_middle  # the loop adds 1 then
    loop.restarting = bool(in_epoch)
    loop._restart_stage = BatchStage.NONE
    if in_epoch:
        loop._restart_stage = BatchStage.RESTARTED_ON_LAST if closing else BatchStage.RESTARTED_ON_TRAIN_BATCH_END
    loop.val_loop.restarting = False
    loop.val_loop._has_run = closing  # nothing but the end of the epoch is left


def _parts(trainer: Trainer) -> tuple[Any, Any, Any]:
    """Data module and loops, of which much is private."""
    return trainer.datamodule, trainer.fit_loop, trainer.fit_loop.epoch_loop  # pyright: ignore[reportAttributeAccessIssue]
