"""Log a row per optimizer step without waiting for the device in each of them.

Loss and gradient norm stay tensors until `log_every_n_steps` rows are collected; then one reduction
over the ranks and one copy to the host serve them all. `self.log` would take about 240 µs per value
and step.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from armature.data.feed import Feed
from armature.parallel import process_group
from armature.parallel.targets import weigh
from armature.strategies.base import StrategyMixin
from armature.training.metrics_csv import FIRST_COLUMNS, MetricsCSV
from armature.training.progress import completed_batches
from armature.training.run_hooks import RunHooks
from armature.training.timings import (
    OWN_SECONDS,
    DataWait,
    OwnWork,
    TimingsCSV,
    Totals,
    Window,
    over_ranks,
)
from armature.training.trainer import Trainer as OurTrainer
from armature.validation.relations import OF_STEPS

log = logging.getLogger(__name__)


class Monitor(Protocol):
    """An entry of `StepLog.monitors`, which adds columns; called on every rank.

    An attribute `mean_columns` names columns of which each rank has its own: their mean over the
    ranks is logged.
    """

    def batch_ended(self, trainer: Trainer, *, stepped: bool) -> dict[str, Tensor]:
        """Return columns of this step's row in metrics.csv: equal on every rank, and independent of
        the clock.

        Called at the end of each micro-batch; the result counts if the optimizer has `stepped`.
        """
        ...

    def measured(self, trainer: Trainer, window: Window) -> dict[str, float]:
        """Return this rank's columns of timings.csv, with the same names on every rank."""
        ...


class ExpertLoad:
    """A monitor of the step log: the largest and smallest load of any expert, in multiples of its
    block's mean.

    `experts/load_max` is 1 if all experts are used alike; `experts/load_min` is 0 if one is not
    used at all.
    """

    def __init__(self, module: nn.Module) -> None:
        self.mixtures: list[Any] = [each for each in module.modules() if hasattr(each, "load_LE")]

    def batch_ended(self, trainer: Trainer, *, stepped: bool) -> dict[str, Tensor]:
        loads = [model.load_LE.float() for model in self.mixtures if model.load_LE is not None]
        if not stepped or not loads:
            return {}
        # dense blocks have no tokens; two mixtures may have different numbers of experts
        lowest = [
            load_LE.where(load_LE.sum(1, keepdim=True) > 0, torch.inf).min() for load_LE in loads
        ]
        highest = torch.stack([load_LE.max() for load_LE in loads]).max()
        return {"experts/load_max": highest, "experts/load_min": torch.stack(lowest).min()}

    def measured(self, trainer: Trainer, window: Window) -> dict[str, float]:
        return {}


class StepLog(RunHooks, Callback):
    """Write step, epoch, samples, tokens, lr, train/loss and train/grad_norm of each optimizer
    step.

    With fp16 also train/loss_scale, after the step, and train/skipped: 1 if the step was left out
    on all ranks because a gradient overflowed. It counts as a step, but moves no learning-rate
    schedule.

    Values that depend on the clock go to timings.csv and to the other loggers, once per write:
    samples and tokens per second, seconds per step, `data_wait`, the share of the time that the
    slowest rank waits for its next batch, and with several ranks `slowest_rank`, whose own work
    took `own_seconds_per_step`.

    Args:
        csv: receives every row, like the trainer's loggers.
        feed: knows the position in the training data.
        every_n_steps: optimizer steps between two writes; no row is left out.
        rows_read: called on all ranks with rows that were read and written, and the ranks whose
            own loss was not finite by step; it may end the run.

    Attributes:
        last: the newest row that was written.
        rate: samples per second of all ranks, over the rows of the newest write of this process.
        data_wait: as the column, over the same rows.
        monitors: further sources of columns.
    """

    COLUMNS = frozenset({*FIRST_COLUMNS[1:], "train/loss_scale", "train/skipped"})  # all but step

    def __init__(
        self,
        csv: MetricsCSV,
        feed: Feed,
        *,
        every_n_steps: int,
        rows_read: Callable[[OurTrainer, list[dict[str, Any]], dict[int, list[int]]], None]
        | None = None,
    ) -> None:
        self.rows_read = rows_read
        self.csv, self.timings = csv, TimingsCSV(csv.file.parent)
        self.every_n_steps = every_n_steps
        self.feed, self.tokens_per_sample = feed, feed.assets.tokens_per_sample
        self.samples_seen = 0
        self.last: dict[str, float] = {}
        self.rate = 0.0
        self.data_wait = 0.0
        self.monitors: list[Monitor] = []
        self.wait: DataWait | None = None
        self.work: OwnWork | None = None
        self._totals, self._advised = Totals(), False  # about a long wait for data
        self._pending: list[dict[str, Any]] = []
        self._loss: Tensor | None = None
        self._bad_ranks: dict[int, list[int]] = {}  # of the newest rows
        self._lr: float | Tensor | None = None
        self._since = 0.0

    @classmethod
    def of(cls, trainer: Trainer) -> "StepLog":
        """The run's step log, to which a monitor adds its columns."""
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        return next(callback for callback in callbacks if isinstance(callback, cls))

    def state_dict(self) -> dict[str, Any]:
        return {"row": dict(self.csv.held), "last": self.last, "lr": self._lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.csv.held = dict(state_dict["row"])
        self.last = state_dict["last"]
        # of the next row too, if its batch makes no optimizer step
        self._lr = state_dict["lr"]

    def training_begins(self, trainer: Trainer) -> None:
        """Drop the rows after the restored checkpoint."""
        self.csv.resume_from(completed_batches(trainer))
        self.timings.resume_from(completed_batches(trainer))

    def summary(self) -> dict[str, float]:
        """Return the columns of timings.csv over all steps of this process: time-weighted means,
        maxima for memory.
        """
        return self._totals.values()

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        trainer.step_metrics.reserved = self.COLUMNS
        trainer.step_metrics.epoch = lambda: self._epoch_of(self.samples_seen)

    def _epoch_of(self, samples: int) -> float:
        """Return the `epoch` of a row: where its global batch began, in epochs."""
        return round(max(0, samples - self.feed.global_batch_size) / self.feed.train_size, 6)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.wait = trainer.fit_loop.epoch_loop.data_wait = DataWait(trainer)
        self.work = OwnWork(self.wait.marks) if trainer.world_size > 1 else None
        self.samples_seen = self.feed.samples_seen
        # for what on_train_start of the user's callbacks and module logs
        self.csv.is_silent = completed_batches(trainer) > 0
        self.monitors.append(ExpertLoad(pl_module))
        self.restart_clock()

    def first_batch_follows(self, trainer: Trainer) -> None:
        self.csv.is_silent = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss = None  # left over from an epoch that ended within a global batch

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self.work is not None:
            self.work.batch_began()

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self.work is not None:
            self.work.backward_begins()
        if pl_module.automatic_optimization:
            self._lr = _first_rate(trainer.optimizers)  # before the scheduler changes it

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self.wait is not None
        strategy = StrategyMixin.of(trainer)
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        columns = [monitor.batch_ended(trainer, stepped=stepped) for monitor in self.monitors]
        self.wait.batch_ended()
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        # the micro-batch's share: Lightning divides by accumulation. A module's own backward may
        # take several numbers
        if loss is not None and loss.numel() == 1:
            loss = weigh(loss.detach(), strategy.target_weights.batch_targets)
            self._loss = loss if self._loss is None else self._loss + loss
        if not stepped:
            return
        self.samples_seen = self.feed.samples_seen
        # any number of optimizers may have stepped, or none
        if not pl_module.automatic_optimization:
            self._lr = _first_rate(trainer.optimizers)
        self.csv.step = step = completed_batches(trainer)
        row: dict[str, Any] = {"step": step, "samples": self.samples_seen}
        if self._lr is not None:
            row["lr"] = self._lr
        if self._loss is not None:
            scale = strategy.gradient_scale()
            row["train/loss"], self._loss = (
                self._loss if scale is None else self._loss * scale,
                None,
            )
        # manual: any number of gradients per batch
        if pl_module.automatic_optimization:
            norm, strategy.grad_norm = strategy.grad_norm, None
            if norm is not None:  # a module's optimizer_step may leave steps out
                row["train/grad_norm"] = norm
            if strategy.scaler is not None:
                row["train/loss_scale"], row["train/skipped"] = (
                    strategy.loss_scale(),
                    int(strategy.skipped_step),
                )
        for column in columns:
            row.update(column)
        self._pending.append(row)
        if len(self._pending) >= self.every_n_steps:
            self._log_pending(trainer)

    def flush(self, trainer: Trainer) -> None:
        """Log the pending rows and write what the files still lack, but for the newest row.

        All ranks call it.
        """
        self._log_pending(trainer)
        self._write_files(trainer)

    def _write_files(self, trainer: Trainer) -> None:
        """Write what is kept for the next write: a run that is killed resumes behind the rows of
        its checkpoint.
        """
        self.csv.write_ready()
        self.timings.write_ready()
        for logger in trainer.loggers:
            logger.save()

    def _log_pending(self, trainer: Trainer) -> None:
        """Reduce and read the pending rows, and pass them to metrics.csv and the loggers.

        All ranks call it.
        """
        if not self._pending:
            return
        assert self.wait is not None
        waited = self.wait.read()
        rows, self._pending = self._pending, []
        seconds = time.perf_counter() - self._since
        samples = len(rows) * self.feed.global_batch_size
        window = Window(steps=len(rows), samples=samples, seconds=seconds, data_wait=waited)
        own = {"data_wait": waited / seconds}
        if self.work is not None:
            own[OWN_SECONDS] = self.work.read() / len(rows)
        for monitor in self.monitors:
            own |= monitor.measured(trainer, window)
        ranks = self._read(trainer, rows, [*own.values()])
        over_all_ranks = {
            name: over_ranks(name, values) for name, values in zip(own, ranks, strict=True)
        }

        self.rate, self.data_wait = samples / seconds, over_all_ranks["data_wait"]
        timing = {"seconds_per_step": seconds / len(rows), "samples_per_second": self.rate}
        if self.tokens_per_sample is not None:
            timing["tokens_per_second"] = self.rate * self.tokens_per_sample
        timing |= over_all_ranks
        self._totals.add(timing, window=window)
        if self.work is not None:
            timing["slowest_rank"] = ranks[1].index(max(ranks[1]))
        if advice := self._totals.waiting(batches=trainer.accumulate_grad_batches):
            if trainer.is_global_zero and not self._advised:
                log.warning("%s", advice)
            self._advised = True
        self._write(trainer, rows, timing)
        if self.rows_read is not None:
            self.rows_read(trainer, rows, self._bad_ranks)  # pyright: ignore[reportArgumentType]
        self._since = time.perf_counter()

    def _read(
        self, trainer: Trainer, rows: list[dict[str, Any]], own: list[float]
    ) -> list[list[float]]:
        """Replace the tensors in `rows` by numbers, a loss by its mean over ranks; return each of
        `own` by rank.

        With manual optimization, some ranks may have no loss of a step: the mean is over the
        others.
        """
        device = trainer.strategy.root_device

        def number(value: Any) -> Tensor:
            return torch.as_tensor(value).detach().to(device, torch.float32).reshape(())

        own_columns = (getattr(monitor, "mean_columns", ()) for monitor in self.monitors)
        names = sorted({"train/loss"}.union(*own_columns))
        means = [(row, name) for row in rows for name in names]
        others = [
            (row, name)
            for row in rows
            for name, value in row.items()
            if isinstance(value, Tensor) and name not in names
        ]
        given = [float(name in row) for row, name in means]
        # Each rank has a row of its own, so that no sum depends on how a collective splits a tensor
        mine = torch.stack([number(row.get(name, 0.0)) for row, name in means])
        table = torch.zeros(trainer.world_size, 2 * len(means) + len(own), device=device)
        table[trainer.global_rank] = torch.cat([mine, torch.tensor([*given, *own], device=device)])
        if trainer.world_size > 1:
            table = process_group.all_sum(table)
        rest = [number(row[name]).reshape(1) for row, name in others]
        found = torch.cat([table.flatten(), *rest]).cpu()  # in one copy
        ranks: list[list[float]] = found[: table.numel()].view(table.shape).tolist()
        for (row, name), value in zip(others, found[table.numel() :].tolist(), strict=True):
            row[name] = value
        self._bad_ranks = {}
        for i, (row, name) in enumerate(means):
            if having := sum(each[len(means) + i] for each in ranks):
                row[name] = sum(each[i] for each in ranks) / having
            else:
                row.pop(name, None)
            if name == "train/loss" and not math.isfinite(row.get(name, 0.0)):
                bad = [rank for rank, each in enumerate(ranks) if not math.isfinite(each[i])]
                self._bad_ranks[row["step"]] = bad
        return [[*by_rank] for by_rank in zip(*ranks, strict=True)][2 * len(means) :]

    def _write(self, trainer: Any, rows: list[dict[str, Any]], timing: dict[str, float]) -> None:
        for row in rows:
            row["epoch"] = self._epoch_of(row["samples"])
            if self.tokens_per_sample is not None:
                row["tokens"] = row["samples"] * self.tokens_per_sample
        self.last = rows[-1]
        trainer.step_metrics.publish(
            {name: self.last[name] for name in OF_STEPS if name in self.last}
        )
        self.csv.write_rows(rows)
        self.timings.write_rows([{"step": rows[-1]["step"], **timing}])
        newest = {name: value for name, value in (self.last | timing).items() if name != "step"}
        for logger in trainer.loggers:
            if logger is not self.csv:
                logger.log_metrics(metrics=newest, step=int(self.last["step"]))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.flush(trainer)

    def restart_clock(self) -> None:
        """Exclude what was done since the last write (validation, saving) from the rate."""
        self._since = time.perf_counter()
        if self.wait is not None:
            self.wait.clear()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.restart_clock()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)  # for callbacks and schedulers that monitor a column

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        if trainer.training and loop.batch_ends_step:
            # `rows_read` may refuse what a callback of the user's is about to save
            self.flush(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.csv.is_silent = False  # a callback may have ended the run before the first batch
        self.flush(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._write_files(trainer)


def _first_rate(optimizers: list[Optimizer]) -> float | Tensor | None:
    """Return the learning rate of the first group; 0.0 if a module's configure_optimizers returns
    None.

    None if the optimizer has none: COCOB, or an Adafactor that computes the size of its steps.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rate = groups[0].get("lr") if groups else 0.0
    # a schedule changes a tensor in place before it is read
    return rate.clone() if isinstance(rate, Tensor) else rate
