"""When checkpoints are saved, which are kept, and which one `last` names."""

import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT

from armature.callbacks.step_log import StepLog
from armature.callbacks.stop import StoppedBySignal


class Checkpointing(Checkpoint):
    """Saves `checkpoints/step=000120/` every n steps, every n minutes and at the end; keeps the newest and the best.

    A checkpoint that is due at a step with validation is saved after it, so that its metric is known.

    Args:
        monitor: the logged value that decides which are best; `mode` is min or max.
    """

    def __init__(
        self,
        directory: Path,
        step_log: StepLog,
        *,
        every_n_steps: int | None,
        every_n_minutes: float | None,
        keep_last: int,
        keep_best: int,
        monitor: str,
        mode: str,
        at_end: bool,
        background: bool,
    ) -> None:
        self.directory = directory
        self.step_log = step_log
        self.every_n_steps = every_n_steps
        self.every = timedelta(minutes=every_n_minutes) if every_n_minutes is not None else None
        self.keep_last, self.keep_best = keep_last, keep_best
        self.monitor, self.mode, self.at_end = monitor, mode, at_end
        self.background = background
        self.scores: dict[int, float] = {}  # by step, of the checkpoints that exist
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._due = False

    def state_dict(self) -> dict[str, Any]:
        return {"scores": dict(self.scores)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = {s: v for s, v in state_dict["scores"].items() if self._path(s).exists()}

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best score so far."""
        if not self.scores:
            return None
        return self._path((min if self.mode == "min" else max)(self.scores, key=self.scores.__getitem__))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        strategy.published, strategy.save_in_background = self._published, self.background
        self._saved_at = time.monotonic()
        self._saved_step = trainer.global_step  # resumed from there, or nothing to save yet

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step = trainer.global_step
        self._due = (
            self._due or bool(self.every_n_steps and step % self.every_n_steps == 0) or self._time_is_up(trainer)
        )
        if self._due and not self._validates_now(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        value = trainer.callback_metrics.get(self.monitor)
        score = None if value is None else float(value)
        if self._due or self._is_best(score):
            self._save(trainer, score)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end or trainer.should_stop:
            self._save(trainer)
        strategy: Any = trainer.strategy
        strategy.finish_saves()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, StoppedBySignal) and trainer.state.fn == "fit":
            self._save(trainer)

    def _time_is_up(self, trainer: Trainer) -> bool:
        if self.every is None or trainer.global_step % 10:  # the ranks agree on the time, and not in every step
            return False
        due = time.monotonic() - self._saved_at > self.every.total_seconds()
        return trainer.strategy.broadcast(due) if trainer.world_size > 1 else due

    def _validates_now(self, trainer: Trainer) -> bool:
        loop = trainer.fit_loop
        assert loop._data_fetcher is not None
        return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # the very question Lightning asks next

    def _is_best(self, score: float | None) -> bool:
        if not self.keep_best or score is None:
            return False
        better = sum((s <= score) if self.mode == "min" else (s >= score) for s in self.scores.values())
        return better < self.keep_best

    def _path(self, step: int) -> Path:
        return self.directory / f"step={step:06d}"

    def _save(self, trainer: Trainer, score: float | None = None) -> None:
        self._due = False
        step = trainer.global_step
        if step == self._saved_step:
            return
        self.step_log.flush(trainer)
        self._saved_step, self._saved_at = step, time.monotonic()
        if score is not None:
            self.scores[step] = score
        there = self._path(step).exists()  # a run that went back and came by again: the same weights
        if not (trainer.strategy.broadcast(there) if trainer.world_size > 1 else there):
            trainer.save_checkpoint(self._path(step))
        elif trainer.is_global_zero:
            self._published(self._path(step))
        self.step_log.restart_clock()

    def _published(self, checkpoint: Path) -> None:
        """On rank 0, once a checkpoint is complete and has its name; after a save in the background, in its thread."""
        write_pointer(self.directory, checkpoint.name)
        self._prune(int(checkpoint.name.split("=")[1]))

    def _prune(self, newest: int) -> None:
        existing = sorted(int(p.name.split("=")[1]) for p in self.directory.glob("step=*") if p.name[5:].isdigit())
        best = sorted(self.scores, key=self.scores.__getitem__, reverse=self.mode == "max")[: self.keep_best]
        keep = {newest, *[s for s in existing if s <= newest][-self.keep_last :], *best}
        for step in set(existing) - keep:
            self.scores.pop(step, None)
            shutil.rmtree(self._path(step))


def write_pointer(directory: Path, name: str) -> None:
    """`last` names the newest complete checkpoint; it changes in one piece."""
    part = directory / ".last.part"
    part.write_text(f"{name}\n")
    os.replace(part, directory / "last")
