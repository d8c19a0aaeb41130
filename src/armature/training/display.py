"""Show progress on rank 0: a bar on a terminal, plain lines in a pipe or under Slurm."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import nn

from armature.training.progress import completed_batches
from armature.training.step_log import StepLog
from armature.training.timings import MAX_DATA_WAIT
from armature.validation.relations import OF_STEPS

SHOWN = ("loss", "train/loss", "lr")  # names that the bar shows anyway


class Display(Callback):
    """Print what is trained at the start, and what came of it at the end; another callback shows
    progress.

    Args:
        start_line: returns the line that describes the run, once the strategy has set up the model.
    """

    def __init__(self, start_line: Callable[[Trainer], str]) -> None:
        super().__init__()
        self.start_line = start_line
        self.console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            self.console.print(
                *args, markup=False, **{key: kwargs[key] for key in ("sep", "end") if key in kwargs}
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enabled = trainer.is_global_zero
        self.print(self.start_line(trainer))
        self._show_model(pl_module)

    def _show_model(self, module: LightningModule) -> None:
        """Print a line per part of the model, with its number of parameters."""
        model = getattr(module, "model", None)
        # users' `model` may be a name or a method
        model = model if isinstance(model, nn.Module) else module
        table = Table(box=None, pad_edge=False)
        for column in ("part", "type", "parameters"):
            table.add_column(column, justify="right" if column == "parameters" else "left")
        for name, child in model.named_children():
            count = sum(p.numel() for p in child.parameters())
            table.add_row(name, type(child).__name__, f"{count:,}")
        self.print(table)

    def show_metrics(self, metrics: dict[str, float]) -> None:
        table = Table(box=None, pad_edge=False)
        table.add_column("metric")
        table.add_column("value", justify="right")
        for name, value in metrics.items():
            table.add_row(name, f"{value:.4f}")
        self.print(table)


class Bar(Display, ProgressBar):
    """Also show step, loss, learning rate, samples or tokens per second and the time left.

    The values that a module logs with `prog_bar=True` follow.

    Args:
        step_log: source of the values; of the step, the bar never reads a tensor itself.
        plain_every: seconds between two lines without a terminal.
    """

    def __init__(
        self,
        start_line: Callable[[Trainer], str],
        *,
        step_log: StepLog,
        total_steps: int,
        plain_every: float = 10.0,
    ) -> None:
        super().__init__(start_line)
        self.step_log, self.total_steps, self.plain_every = step_log, total_steps, plain_every
        self._logged = ""
        self._before: dict[str, Any] = {}  # what was logged when validation began
        self._progress: Progress | None = None
        self._task: Any = None
        self._printed = self._started = 0.0
        self._first_step = 0

    def enable(self) -> None:
        self._enabled = True

    @property
    def is_enabled(self) -> bool:  # LightningModule.print asks
        return self._enabled

    def disable(self) -> None:  # Lightning calls it on every rank but 0
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._printed = time.monotonic()
        self._first_step = completed_batches(trainer)
        super().on_train_start(trainer, pl_module)
        if self._enabled and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=1,  # drawing takes a millisecond of a core that may be training
                expand=True,
            )
            self._task = self._progress.add_task(
                "", total=self.total_steps, completed=self._first_step
            )
            self._progress.start()

    def _is_due(self) -> bool:
        """Return whether it is time to print another line, or to draw the bar anew."""
        every = self.plain_every if self._progress is None else 0.5
        if not self._enabled or time.monotonic() - self._printed <= every:
            return False
        self._printed = time.monotonic()
        return True

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches or not self._is_due():
            return
        done = completed_batches(trainer)
        # only inside a step: at an epoch's end, reading is a collective; val/ has its own line
        logged = trainer.progress_bar_metrics
        shown = [name for name in logged if name not in SHOWN and not name.startswith("val/")]
        self._logged = "".join(f" {name} {float(logged[name]):.4g}" for name in shown)
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=self._values())
            return
        spent = self._printed - self._started
        left = spent / (done - self._first_step) * (self.total_steps - done)
        self.print(f"step {done}/{self.total_steps} {self._values()} {_duration(left)} left")

    def _values(self) -> str:
        log = self.step_log
        if not log.last:
            return ""
        unit = "samples" if log.tokens_per_sample is None else "tokens"
        loss = f"loss {log.last['train/loss']:.4f} " if "train/loss" in log.last else ""
        lr = f"lr {log.last['lr']:.2e} " if "lr" in log.last else ""
        waits = log.data_wait > MAX_DATA_WAIT
        waiting = f" {log.data_wait:.0%} waiting for data" if waits else ""
        rate = log.rate * (log.tokens_per_sample or 1)
        return f"{loss}{lr}{rate:,.0f} {unit}/s{waiting}{self._logged}"

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = {**trainer.callback_metrics}
        self._printed = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._printed = time.monotonic()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._show_evaluation("validation", batch_idx, trainer.num_val_batches, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._show_evaluation("test", batch_idx, trainer.num_test_batches, dataloader_idx)

    def _show_evaluation(
        self, what: str, batch_idx: int, counts: Sequence[float], loader: int
    ) -> None:
        """Show how far an evaluation is that takes long: without it a run seems to hang after its
        last step.
        """
        if not self._is_due():
            return
        known = f"/{counts[loader]}" if math.isfinite(counts[loader]) else ""
        which = f" of loader {loader}" if len(counts) > 1 else ""
        text = f"{what} batch {batch_idx + 1}{known}{which}"
        if self._progress is None:
            self.print(text)
        else:
            self._progress.update(self._task, description=text)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            found = trainer.callback_metrics
            # of this validation, whatever their names: values that it has replaced
            names = sorted(
                name
                for name in found
                if found[name] is not self._before.get(name) and name not in OF_STEPS
            )
            values = " ".join(f"{name} {float(found[name]):.4f}" for name in names)
            self.print(f"step {completed_batches(trainer)}/{self.total_steps} {values}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._progress is not None:
            done = completed_batches(trainer)
            self._progress.update(self._task, completed=done, description=self._values())
            self._progress.stop()
            self._progress = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.on_train_end(trainer, pl_module)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
