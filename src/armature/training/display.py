"""Show progress on rank 0: a line that is written over on a terminal, plain lines in a pipe or
under Slurm.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.types import STEP_OUTPUT

from armature.training.progress import completed_batches
from armature.training.step_log import StepLog
from armature.training.timings import MAX_DATA_WAIT
from armature.validation.relations import OF_STEPS

SHOWN = ("loss", "train/loss", "lr")  # names that the line shows anyway
CLEAR = "\r\x1b[2K"  # the line of a terminal
WIDTH = 20  # of the bar


class Display(Callback):
    """Print what is trained at the start, and what came of it at the end; another callback shows
    progress.

    Args:
        start_line: returns the line that describes the run, once the strategy has set up the model.
    """

    def __init__(self, start_line: Callable[[Trainer], str]) -> None:
        super().__init__()
        self.start_line = start_line
        self._enabled = True
        self._before = ""  # what makes room for the next line

    def print(self, *args: Any, sep: str = " ", end: str = "\n", **kwargs: Any) -> None:
        if self._enabled:
            print(f"{self._before}{sep.join(map(str, args))}", end=end, file=sys.stderr, flush=True)
            self._before = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enabled = trainer.is_global_zero
        self.print(self.start_line(trainer))
        # users' `model` may be a name or a method
        model = getattr(pl_module, "model", None)
        parts = (model if isinstance(model, torch.nn.Module) else pl_module).named_children()
        counts = ((n, type(m).__name__, sum(p.numel() for p in m.parameters())) for n, m in parts)
        rows = ((name, kind, f"{count:,}") for name, kind, count in counts)
        self.print(_table([("part", "type", "parameters"), *rows]))

    def show_metrics(self, metrics: dict[str, float]) -> None:
        rows = ((name, f"{value:.4f}") for name, value in metrics.items())
        self.print(_table([("metric", "value"), *rows]))


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
        self.step_log, self.total_steps = step_log, total_steps
        self._on_terminal = sys.stderr.isatty()
        self._every = 0.5 if self._on_terminal else plain_every
        self._known: dict[str, Any] = {}  # what was logged when validation began
        self._printed = self._started = 0.0
        self._first_step = 0

    def enable(self) -> None:
        self._enabled = True

    @property
    def is_enabled(self) -> bool:  # LightningModule.print asks
        return self._enabled

    def disable(self) -> None:  # Lightning calls it on every rank but 0
        self._enabled = False

    def _is_due(self) -> bool:
        if not self._enabled or time.monotonic() - self._printed <= self._every:
            return False
        self._printed = time.monotonic()
        return True

    def _show(self, text: str) -> None:
        """Print a line, on a terminal over the last one that was shown so."""
        if not self._on_terminal:
            self.print(text)
            return
        self.print(text[: shutil.get_terminal_size().columns - 1], end="")
        self._before = CLEAR

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._printed = time.monotonic()
        self._first_step = completed_batches(trainer)
        super().on_train_start(trainer, pl_module)

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
        own = "".join(f" {name} {float(logged[name]):.4g}" for name in shown)
        pace = (self._printed - self._started) / (done - self._first_step)
        drawn = "━" * (WIDTH * done // self.total_steps)
        bar = f" {drawn:<{WIDTH}}" if self._on_terminal else ""
        left = timedelta(seconds=int(pace * (self.total_steps - done)))
        self._show(f"step {done}/{self.total_steps}{bar} {left} left {self._values()}{own}")

    def _values(self) -> str:
        log = self.step_log
        if not log.rate:
            return ""
        unit = "samples" if log.tokens_per_sample is None else "tokens"
        loss = f"loss {log.last['train/loss']:.4f} " if "train/loss" in log.last else ""
        lr = f"lr {log.last['lr']:.2e} " if "lr" in log.last else ""
        waiting = f" {log.data_wait:.0%} waiting for data" if log.data_wait > MAX_DATA_WAIT else ""
        rate = log.rate * (log.tokens_per_sample or 1)
        return f"{loss}{lr}{rate:,.0f} {unit}/s{waiting}"

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._known = {**trainer.callback_metrics}
        self._printed = time.monotonic()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any,
        batch_idx: int, dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Show how far an evaluation is that takes long: without it a run seems to hang after its
        last step.
        """
        if self._is_due():
            what, counts = "validation", trainer.num_val_batches
            if trainer.testing:
                what, counts = "test", trainer.num_test_batches
            count = counts[dataloader_idx]
            known = f"/{count}" if math.isfinite(count) else ""
            which = f" of loader {dataloader_idx}" if len(counts) > 1 else ""
            self._show(f"{what} batch {batch_idx + 1}{known}{which}")

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            # of this validation, whatever their names: values that it has replaced
            new = {
                name: float(value)
                for name, value in trainer.callback_metrics.items()
                if value is not self._known.get(name) and name not in OF_STEPS
                if torch.as_tensor(value).numel() == 1
            }
            values = " ".join(f"{name} {new[name]:.4f}" for name in sorted(new))
            self.print(f"step {completed_batches(trainer)}/{self.total_steps} {values}")

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self.print(end="")  # an error begins a line


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows as lines, the last column on the right."""
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for *texts, number in zip(*columns, strict=True):
        texts = [f"{text:<{width}}" for text, width in zip(texts, widths, strict=False)]
        lines.append("  ".join([*texts, f"{number:>{widths[-1]}}"]))
    return "\n".join(lines)
