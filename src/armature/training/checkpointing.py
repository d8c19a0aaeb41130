"""When checkpoints are saved, which are kept, and which one `last` names."""

import logging
import math
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from armature import files
from armature.checkpoint import manifest, storage
from armature.training.step_log import StepLog
from armature.training.stop import StoppedBySignal
from armature.training.trainer import Trainer as OurTrainer
from armature.training.trainer import validates_now

log = logging.getLogger(__name__)


class Checkpointing(Checkpoint):
    """Saves `step=000120/` every n steps, every n minutes and at the end; keeps the newest, the best and milestones.

    A checkpoint that is due at a step with validation is saved after it, so that its metric is known. One that is saved
    because the run stops comes before it; then the run that goes on validates first.

    Args:
        directory: where the checkpoints are, on this machine or in an object store.
        monitor: the logged value that decides which are best; `mode` is min or max.
        keep_every_n_steps: checkpoints at multiples of it are never removed.
        on_failure: what a save that fails (a full disk) does to the run: `continue` or `stop`.
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
        keep_every_n_steps: int | None,
        monitor: str,
        mode: str,
        at_end: bool,
        background: bool,
        on_failure: str,
    ) -> None:
        self.directory = directory
        self.step_log = step_log
        self.every_n_steps = every_n_steps
        self.every = timedelta(minutes=every_n_minutes) if every_n_minutes is not None else None
        self.keep_last, self.keep_best, self.keep_every_n_steps = keep_last, keep_best, keep_every_n_steps
        self.monitor, self.mode, self.at_end = monitor, mode, at_end
        self.background, self.on_failure = background, on_failure
        self.scores: dict[int, float] = {}  # by step, of the checkpoints that exist
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._validated_step = -1
        self._owes_validation = False  # due at the step of the checkpoint, and not run
        self._due = False
        self._monitor_told = False

    def state_dict(self) -> dict[str, Any]:
        return {"scores": dict(self.scores), "owes_validation": self._owes_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = {s: v for s, v in state_dict["scores"].items() if self._path(s).exists()}
        self._owes_validation = state_dict["owes_validation"]

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best score so far."""
        if not self.scores:
            return None
        return self._path((min if self.mode == "min" else max)(self.scores, key=self.scores.__getitem__))

    def begin(self, trainer: OurTrainer) -> None:
        """Before the first batch: draw on where the checkpoint was saved, and run the validation that it owes."""
        strategy: Any = trainer.strategy
        strategy.published, strategy.save_in_background = self._published, self.background
        if trainer.is_global_zero:
            storage.clear_unfinished(self.directory)
        self._saved_at = time.monotonic()
        self._saved_step = trainer.global_step  # resumed from there, or nothing to save yet
        if self._owes_validation:
            strategy.restore_random()
            self.step_log.resume(trainer)
            trainer.validate_now()
            strategy.hold_random()

    def step_ended(self, trainer: Trainer) -> None:
        """Not on_train_batch_end: there, hooks of others are still to come that may change what a checkpoint holds."""
        step = trainer.global_step
        self._due = (
            self._due or bool(self.every_n_steps and step % self.every_n_steps == 0) or self._time_is_up(trainer)
        )
        if self._due and not validates_now(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._validated_step, self._owes_validation = trainer.global_step, False
        value = trainer.callback_metrics.get(self.monitor)
        score = None if value is None or math.isnan(value) else float(value)
        if value is None and self.keep_best and trainer.is_global_zero and not self._monitor_told:
            self._monitor_told = True
            log.warning(
                "checkpoint.monitor=%s: nothing has that name, so no checkpoint is kept as best. Logged are: %s.",
                self.monitor,
                ", ".join(sorted(trainer.callback_metrics)) or "nothing",
            )
        if self._due or self._is_best(score):
            self._save(trainer, score)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end or trainer.should_stop:
            self._save(trainer, final=True)
        strategy: Any = trainer.strategy
        strategy.finish_saves()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, StoppedBySignal) and trainer.state.fn == "fit":
            self._owes_validation = self._validated_step != trainer.global_step and validates_now(trainer)
            self._save(trainer)

    def _time_is_up(self, trainer: Trainer) -> bool:
        if self.every is None or trainer.global_step % 10:  # the ranks agree on the time, and not in every step
            return False
        due = time.monotonic() - self._saved_at > self.every.total_seconds()
        return trainer.strategy.broadcast(due) if trainer.world_size > 1 else due

    def _is_best(self, score: float | None) -> bool:
        if not self.keep_best or score is None:
            return False
        better = sum((s <= score) if self.mode == "min" else (s >= score) for s in self.scores.values())
        return better < self.keep_best

    def _path(self, step: int) -> Path:
        return self.directory / f"step={step:06d}"

    def _save(self, trainer: Trainer, score: float | None = None, *, final: bool = False) -> None:
        self._due = False
        step = trainer.global_step
        if score is not None:
            self.scores[step] = score
        if step == self._saved_step:
            return
        self.step_log.flush(trainer)
        self._saved_at = time.monotonic()
        strategy: Any = trainer.strategy
        try:
            strategy.finish_saves()  # of the one before, which may have failed since
        except OSError as error:
            self._failed(trainer, self._saved_step, error)
        try:
            trainer.save_checkpoint(self._path(step))
            self._saved_step = step
        except OSError as error:
            self._failed(trainer, step, error)
            if final:
                raise
        self.step_log.restart_clock()

    def _failed(self, trainer: Trainer, step: int, error: OSError) -> None:
        """On all ranks, after a save that failed on one of them."""
        self.scores.pop(step, None)
        if self.on_failure == "stop":
            raise error
        if not trainer.is_global_zero:
            return
        free = ""
        if manifest.is_local(self.directory):  # torch does not always say that the disk is full
            free = f"; {shutil.disk_usage(self.directory).free / 1e6:,.1f} MB are free there"
        storage.clear_unfinished(self.directory)  # room for the next one
        pointer = self.directory / "last"
        last = pointer.read_text().strip() if pointer.exists() else "none yet"
        log.error(
            "The checkpoint of step %d could not be saved: %s%s. Earlier ones are untouched (last: %s). "
            "Training goes on, and the next save tries again; checkpoint.on_failure=stop would end it here.",
            step, error, free, last,
        )  # fmt: skip

    def _published(self, checkpoint: Path) -> None:
        """On rank 0, once a checkpoint is complete and has its name; after a save in the background, in its thread."""
        write_pointer(self.directory, checkpoint.name)
        self._prune(int(checkpoint.name.split("=")[1]))

    def _prune(self, newest: int) -> None:
        existing = sorted(int(p.name.split("=")[1]) for p in self.directory.glob("step=*") if p.name[5:].isdigit())
        best = sorted(self.scores, key=self.scores.__getitem__, reverse=self.mode == "max")[: self.keep_best]
        milestones = [s for s in existing if self.keep_every_n_steps and s % self.keep_every_n_steps == 0]
        keep = {newest, *[s for s in existing if s <= newest][-self.keep_last :], *best, *milestones}
        for step in set(existing) - keep:
            self.scores.pop(step, None)
            storage.remove(self._path(step))


def write_pointer(directory: Path, name: str) -> None:
    """`last` names the newest complete checkpoint; it changes in one piece."""
    if not manifest.is_local(directory):
        (directory / "last").write_text(f"{name}\n")  # an object is replaced as a whole
    else:
        files.replace(directory / "last", f"{name}\n")
