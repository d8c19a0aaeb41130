"""A row for every optimiser step, without waiting for the device in each of them.

Loss and gradient norm stay tensors until `log_every_n_steps` rows have come together; then one reduction over the ranks
and one copy to the host serve them all. `self.log` would cost about 240 µs for each value and step.
"""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer

from armature.callbacks.metrics_csv import MetricsCSV


class StepLog(Callback):
    """Writes step, epoch, samples, tokens, lr, train/loss and train/grad_norm of each optimiser step.

    Args:
        csv: the file that every row goes to; the other loggers are the trainer's.
        every_n_steps: optimiser steps between two writes; no row is left out.
        global_batch_size: samples an optimiser step.
        train_size: samples an epoch.
        tokens_per_sample: None for data that are not tokens.

    Attributes:
        last: the newest row that was written.
        rate: samples a second over the rows of the newest write, all ranks together.
    """

    def __init__(
        self,
        csv: MetricsCSV,
        *,
        every_n_steps: int,
        global_batch_size: int,
        train_size: int,
        tokens_per_sample: int | None,
    ) -> None:
        self.csv = csv
        self.every_n_steps = every_n_steps
        self.global_batch_size = global_batch_size
        self.train_size = train_size
        self.tokens_per_sample = tokens_per_sample
        self.samples_seen = 0
        self.last: dict[str, float] = {}
        self.rate = float("nan")
        self.trained_samples = 0  # by this process, for the mean rate of the summary
        self.trained_seconds = 0.0
        self._pending: list[dict[str, Any]] = []
        self._loss: torch.Tensor | None = None
        self._lr = 0.0
        self._since = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"samples_seen": self.samples_seen, "row": dict(self.csv.held)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.samples_seen = state_dict["samples_seen"]
        self.csv.held = dict(state_dict["row"])

    def go_on(self, trainer: Trainer) -> None:
        """Once a checkpoint is restored: later rows are dropped."""
        self.csv.go_on_from(trainer.global_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._lr = optimizer.param_groups[0]["lr"]  # before the scheduler moves it on

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if (
            isinstance(outputs, dict) and "loss" in outputs
        ):  # the micro-batch's share: Lightning divides by accumulation
            loss = outputs["loss"].detach()
            self._loss = loss if self._loss is None else self._loss + loss
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.samples_seen += self.global_batch_size
        row = {
            "step": trainer.global_step,
            "epoch": round((self.samples_seen - self.global_batch_size) / self.train_size, 6),
            "samples": self.samples_seen,
            "lr": self._lr,
            "train/loss": self._loss,
            "train/grad_norm": getattr(trainer.strategy, "grad_norm", None),
        }
        if self.tokens_per_sample is not None:
            row["tokens"] = self.samples_seen * self.tokens_per_sample
        self._pending.append(row)
        self._loss = None
        self.csv.step = trainer.global_step
        if len(self._pending) >= self.every_n_steps:
            self.flush(trainer)

    def flush(self, trainer: Trainer) -> None:
        """Reduces, reads and writes the rows that wait. Called on all ranks together."""
        if not self._pending:
            return
        device = trainer.strategy.root_device
        zero = torch.zeros((), device=device)
        columns = ("train/loss", "train/grad_norm")
        values = torch.stack(
            [
                torch.as_tensor(zero if row[c] is None else row[c], device=device).float()
                for row in self._pending
                for c in columns
            ]
        ).view(-1, 2)
        mean = trainer.strategy.reduce(values.clone(), reduce_op="mean")
        now = time.perf_counter()
        seconds, samples = now - self._since, len(self._pending) * self.global_batch_size
        self.rate = samples / seconds
        self.trained_samples += samples
        self.trained_seconds += seconds
        for row, (loss, _), (_, grad_norm) in zip(self._pending, mean.tolist(), values.tolist(), strict=True):
            for name, value in zip(columns, (loss, grad_norm), strict=True):
                if row[name] is None:
                    del row[name]
                else:
                    row[name] = value
        rows, self._pending = self._pending, []
        self.last = rows[-1]
        self.csv.write_rows(rows)
        for logger in trainer.loggers:
            if logger is not self.csv:
                self._write(logger, rows)
        self._since = time.perf_counter()

    def _write(self, logger: Logger, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            values = {name: value for name, value in row.items() if name != "step"}
            if row is rows[-1]:
                values["samples_per_second"] = self.rate
                if self.tokens_per_sample is not None:
                    values["tokens_per_second"] = self.rate * self.tokens_per_sample
            logger.log_metrics(values, step=row["step"])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self.flush(trainer)

    def restart_clock(self) -> None:
        """Leaves what was done since the last write (validation, saving) out of the rate."""
        self._since = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.restart_clock()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
