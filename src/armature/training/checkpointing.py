"""Decide when checkpoints are saved and which are kept."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from armature.checkpoint import directory
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import NotFinite, NotSaved
from armature.parallel import process_group
from armature.parallel.process_group import Vote
from armature.training import epoch_start
from armature.training.progress import completed_batches
from armature.training.run_hooks import RunHooks
from armature.training.step_log import StepLog
from armature.training.stop import StoppedBySignal
from armature.training.trainer import Trainer as OurTrainer

log = logging.getLogger(__name__)

VOTE_STEPS = 10  # optimizer steps per vote of the ranks on whether every_n_minutes are over


class Checkpointing(RunHooks, Checkpoint):
    """Save `step=000120/` every n steps, every n minutes and at the end; keep the newest, the best
    and milestones.

    A checkpoint that is due at a step with validation is saved after the validation, so that its
    metric is known. One that is saved because the run stops is saved before it; then the resumed
    run validates first.

    Args:
        folder: where the checkpoints are, on this machine or in an object store.
        policy: the `checkpoint` group of the configuration.
        manifest_entries: what the manifests state about the run.
        before_save: called on all ranks before a save, and before they wait for the previous one.

    Attributes:
        writer: writes the checkpoints. Its last save is finished at the end of training, with or
            without an error.
        scores: the monitored value by step, of the checkpoints that exist.
    """

    def __init__(
        self,
        folder: Path,
        step_log: StepLog,
        policy: Any,
        *,
        manifest_entries: dict[str, Any] | None = None,
        before_save: Sequence[Callable[[Trainer], None]] = (),
    ) -> None:
        self.folder = folder
        self.step_log, self.before_save = step_log, before_save
        self.policy = SimpleNamespace(**policy)  # which is read in each step
        self.writer = CheckpointWriter(
            background=self.policy.background,
            entries=manifest_entries,
            on_saved=self._saved,
            keeps_plan=True,
        )
        self.scores: dict[int, float] = {}
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._newest: str | None = None  # of this start, on rank 0
        self._validated_step = -1
        # a validation was due at the checkpoint's step, but did not run
        self._owes_validation = False
        self._due = False
        self._time_vote = Vote()
        self._warned_of_monitor = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "scores": dict(self.scores),
            "owes_validation": self._owes_validation,
            "monitor": self.policy.monitor,
            "mode": self.policy.mode,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved, own = state_dict["scores"], (self.policy.monitor, self.policy.mode)
        of = state_dict["monitor"], state_dict["mode"]
        if saved and of != own:
            saved = {}
            if process_group.rank() == 0:
                log.warning(
                    "checkpoint.monitor=%s checkpoint.mode=%s: scores by %s (%s) do not count. "
                    "The next save may remove the checkpoints that were best by it.",
                    *own, *of,
                )  # fmt: skip
        # a file server may show the ranks different files, but all decide on saves alike
        self.scores = process_group.on_rank_0(
            lambda: {k: v for k, v in saved.items() if self._path(k).exists()}
        )
        self._owes_validation = state_dict["owes_validation"]

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best score so far, or None without any score."""
        return self._path(self._best_first()[0]) if self.scores else None

    @property
    def best_model_path(self) -> str:
        """`best`, under the name that callbacks and modules read from
        `trainer.checkpoint_callback`; or "".
        """
        return str(self.best or "")

    @property
    def last_model_path(self) -> str:
        """The newest complete checkpoint, as ModelCheckpoint has it; or ""."""
        name = directory.read_last(self.folder)
        return "" if name is None else str(self.folder / name)

    @property
    def dirpath(self) -> str:
        """`folder`, as ModelCheckpoint has it."""
        return str(self.folder)

    @property
    def best_score(self) -> float | None:
        """The score of `best`."""
        return self.scores[self._best_first()[0]] if self.scores else None

    def _best_first(self) -> list[int]:
        """Return the steps with a score, from the best to the worst."""
        return sorted(self.scores, key=self.scores.__getitem__, reverse=self.policy.mode == "max")

    def training_begins(self, trainer: OurTrainer) -> None:
        """Remove leftovers, and let the validation that the loaded checkpoint owes run first."""
        if trainer.is_global_zero:
            directory.clear_leftovers(self.folder)
        self._saved_at = time.monotonic()
        # its checkpoint exists, or there is nothing to save yet
        self._saved_step = completed_batches(trainer)
        self._owes_validation &= trainer.enable_validation

    def step_continues(self, trainer: OurTrainer) -> None:
        if self._owes_validation:
            trainer.fit_loop.epoch_loop.validate()

    def step_ended(self, trainer: OurTrainer) -> None:
        """Save if due.

        Not in on_train_batch_end, since later callbacks' hooks may still change what is saved.
        """
        step = completed_batches(trainer)
        # at every step: a vote that was sent must be read at the next one
        every = self.policy.every_n_steps
        self._due |= self._time_is_up(trainer) or bool(every and step % every == 0)
        if self._due and not trainer.fit_loop.epoch_loop.validation_is_due:
            self._save(trainer)

    def validation_ended(self, trainer: OurTrainer) -> None:
        """Save if due, or if the validation was one of the best.

        Not in on_validation_end: the module's comes later.

        There it may put weights back that were replaced for the validation.
        """
        self._validated_step = completed_batches(trainer)
        if self._owes_validation:
            # the loaded checkpoint owes what has run
            self._saved_step, self._owes_validation = -1, False
        value = trainer.callback_metrics.get(self.policy.monitor)
        score = None if value is None or not math.isfinite(value) else float(value)
        # whatever each rank has logged, all ranks save or none does
        score = process_group.broadcast_object(score)
        if (
            value is None
            and self.policy.keep_best
            and trainer.is_global_zero
            and not self._warned_of_monitor
        ):
            self._warned_of_monitor = True
            log.warning(
                "checkpoint.monitor=%s: no logged value has that name, so no checkpoint is kept as "
                "best. Type checkpoint.monitor= with one of %s (and checkpoint.mode=max if more is "
                "better), or checkpoint.keep_best=0.",
                self.policy.monitor,
                ", ".join(sorted(trainer.callback_metrics)) or "the names that validation logs",
            )
        if self._due or self._is_best(score):
            self._save(trainer, score)

    def training_ends(self, trainer: OurTrainer) -> None:
        """Save before the hooks of the end, one of which may fail, and again after those of the
        last epoch's end: these may average the weights.
        """
        self._time_vote.finish()
        # a longer run goes on within the epoch, at whose end it calls them
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._save_again_after("on_train_epoch_end", trainer)
        if self.policy.at_end or trainer.should_stop:
            self._save(trainer, last=True)

    def training_ended(self, trainer: OurTrainer) -> None:
        """Save again if hooks of the end may have changed the weights, as averaging does: the test
        measures these.
        """
        trainer.fit_loop.closed = True
        saves = self.policy.at_end or trainer.should_stop
        if saves:
            self._save_again_after("on_train_end", trainer)
            self._save(trainer, last=True, final=True)
        self._finish_pending(trainer, last=True, final=saves)

    def _save_again_after(self, hook: str, trainer: OurTrainer) -> None:
        """Let the next save be made, even of a step that is saved, if a user has such a hook."""
        # a callback may be rank 0's alone
        if any(process_group.all_gather_object(bool(epoch_start.users_hooks(trainer, hook)))):
            self._finish_pending(trainer)
            self._saved_step = -1

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, StoppedBySignal) and trainer.state.fn == "fit":
            self._owes_validation |= trainer.fit_loop.epoch_loop.validation_is_due
            self._owes_validation &= self._validated_step != completed_batches(trainer)
            try:
                self._save(trainer, last=True)
            finally:
                self._finish_pending(trainer, last=True)
        elif isinstance(exception, NotFinite):  # all ranks come here
            self.writer.finish()
        else:
            self.writer.wait()  # the other ranks may not come here

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.writer.finish()

    def _time_is_up(self, trainer: Trainer) -> bool:
        if (minutes := self.policy.every_n_minutes) is None:
            return False
        step = completed_batches(trainer)
        # a step before it is read, so that no rank waits for the others
        if step % VOTE_STEPS == VOTE_STEPS - 1:
            self._time_vote(time.monotonic() - self._saved_at > 60 * minutes)
        return step % VOTE_STEPS == 0 and any(self._time_vote.finish())

    def _is_best(self, score: float | None) -> bool:
        sign = 1 if self.policy.mode == "min" else -1
        return score is not None and (
            sum(sign * each <= sign * score for each in self.scores.values())
            < self.policy.keep_best
        )

    def _path(self, step: int) -> Path:
        return directory.path_of(self.folder, step)

    def _save(
        self,
        trainer: Trainer,
        score: float | None = None,
        *,
        last: bool = False,
        final: bool = False,
    ) -> None:
        """Save, unless this step is saved.

        Args:
            last: no other save follows: one of this step in the background that has failed is made
                again.
            final: the run has ended, and fails if this save does.
        """
        self._due = False
        step = completed_batches(trainer)
        score = self.scores.get(step) if score is None else score
        if last:
            self._finish_pending(trainer)
        if step == self._saved_step:
            if score is not None:
                self.scores[step] = score
            return
        for function in self.before_save:
            function(trainer)
        self.step_log.flush(trainer)
        self._saved_at = time.monotonic()
        self._finish_pending(trainer)
        # not earlier: the pending save would remove the best one before this one replaces it
        if score is not None:
            self.scores[step] = score
        try:
            trainer.save_checkpoint(self._path(step), storage_options=self.writer)
            self._saved_step = step
        except OSError as error:
            self._failed(trainer, step, error, last=last, final=final)
        self.step_log.restart_clock()

    def _finish_pending(self, trainer: Trainer, **which: bool) -> None:
        """Wait for a save in the background, which may have failed: `which` it is for `_failed`.

        Called by all ranks.
        """
        try:
            self.writer.finish()
        except OSError as error:
            failed, self._saved_step = self._saved_step, -1
            self._failed(trainer, failed, error, **which)

    def _failed(
        self,
        trainer: Trainer,
        step: int,
        error: OSError,
        *,
        last: bool = False,
        final: bool = False,
    ) -> None:
        """Handle a save that failed on one of the ranks.

        Called by all ranks. NotSaved: the run ends because of it.
        """
        self.scores.pop(step, None)
        if final or self.policy.on_failure == "stop":
            what = process_group.on_rank_0(partial(self._describe, step, error))
            why = (
                "The run is not finished without it"
                if final
                else "checkpoint.on_failure=stop ends the run"
            )
            raise NotSaved(
                f"{what} {why}: once there is room, or the store answers, type the same "
                "command with its run.name."
            ) from error
        if trainer.is_global_zero:
            follows = "The run ends." if last else (
                "Training continues, and the next save tries again; checkpoint.on_failure=stop "
                "ends the run instead."
            )  # fmt: skip
            log.error("%s %s", self._describe(step, error), follows)

    def _describe(self, step: int, error: OSError) -> str:
        """Remove leftovers, which makes room, and return what failed and which checkpoint is the
        newest. On rank 0.
        """
        newest = self._newest or "unknown"
        with suppress(OSError), directory.errors_of_store(self.folder):  # a store may still be away
            directory.clear_leftovers(self.folder)
            newest = directory.read_last(self.folder) or "none yet"
        return (
            f"The checkpoint of step {step} could not be saved: {' '.join(str(error).split())}. "
            f"Earlier ones are untouched (last: {newest})."
        )

    def _saved(self, checkpoint: Path) -> None:
        """On rank 0, once a checkpoint has its final name; in the writer's thread if it writes in
        the background.
        """
        directory.write_last(self.folder, checkpoint.name)
        self._newest = checkpoint.name
        newest = directory.step_of(checkpoint)
        assert newest is not None
        self._prune(newest)

    def _prune(self, newest: int) -> None:
        existing = [*directory.checkpoints_in(self.folder)]
        best = self._best_first()[: self.policy.keep_best]
        every = self.policy.keep_every_n_steps
        milestones = [step for step in existing if every and step % every == 0]
        last = [step for step in existing if step <= newest][-self.policy.keep_last :]
        for step in directory.prune(self.folder, keep={newest, *last, *best, *milestones}):
            self.scores.pop(step, None)
