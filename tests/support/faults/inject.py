"""Break a run once, at an exact step, and keep a journal of every step.

The journal, `journal.RANK` in the cell's folder, has a line `time kind step pid` for each start and
optimizer step. `struck` holds the time of the fault and the last checkpoint at that time. If it
exists, no fault strikes again.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.training.progress import completed_batches

EVERY_RANK = -1
LONGEST_HOLD = 150.0  # seconds


def note_strike(folder: Path, checkpoints: Path, *, seconds_ago: float = 0.0) -> None:
    """Write the time and the name of the last checkpoint."""
    pointer = checkpoints / "last"
    name = pointer.read_text().strip() if pointer.is_file() else "step=0"
    part = folder / f"struck.{os.getpid()}"
    part.write_text(f"{time.time() - seconds_ago:.3f} {name}\n")
    part.replace(folder / "struck")


class Inject(Callback):
    """Keep the journal, and strike once from inside the run.

    Args:
        fault: name of a method below; `none` keeps the journal only.
        at_step: completed optimizer steps when it strikes.
        rank: the rank that it strikes; -1: every rank.
        folder: of the cell.
    """

    def __init__(self, *, fault: str, at_step: int, rank: int, folder: str) -> None:
        self.fault, self.at_step, self.rank = fault, at_step, rank
        self.folder = Path(folder)
        self.over = (self.folder / "struck").exists()  # in an earlier process of this run
        self._filler: Path | None = None

    # ------------------------------------------------------------ Lightning's hooks
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer, "start", completed_batches(trainer))
        if self._is_mine(trainer) and self.fault.startswith("in_"):
            getattr(self, self.fault)(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step = completed_batches(trainer)
        self._note(trainer, "step", step)
        if self._filler is not None and step > self.at_step + 1:
            self._filler.unlink(missing_ok=True)  # free the disk
            self._filler = None
        if step == self.at_step and self._is_mine(trainer) and self.fault.startswith("at_"):
            getattr(self, self.fault.partition(":")[0])(trainer)

    # ------------------------------------------------------------ after a step
    def at_signal(self, trainer: Trainer) -> None:
        """Get the signal that the fault names after a colon."""
        self._strike(trainer)
        os.kill(os.getpid(), getattr(signal, self.fault.partition(":")[2]))

    def at_hang(self, trainer: Trainer) -> None:
        """Never enter the next collective."""
        self._strike(trainer)
        while True:
            time.sleep(1)

    def at_hold(self, trainer: Trainer) -> None:
        """Wait until the fault from outside has struck."""
        self._strike(trainer)
        self._wait(lambda: (self.folder / "acted").exists())

    def at_full_disk(self, trainer: Trainer) -> None:
        """Fill the file system of the run directory, except for a few lines of a log."""
        self._strike(trainer)
        root = Path(trainer.default_root_dir)
        status = os.statvfs(root)
        self._filler = self.folder / "outputs" / "filler"
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - 65536)

    # ------------------------------------------------------------ in the middle of something
    def in_training_step(self, trainer: Trainer, module: LightningModule) -> None:
        usual = module.training_step

        def failing(*args: Any, **kwargs: Any) -> Any:
            if completed_batches(trainer) == self.at_step and self._is_mine(trainer):
                self._strike(trainer)
                raise ArithmeticError("the deliberate mistake")
            return usual(*args, **kwargs)

        module.training_step = failing  # pyright: ignore[reportAttributeAccessIssue]

    def in_save(self, trainer: Trainer, module: LightningModule) -> None:
        """Die when all files are written and the directory does not have its final name yet."""
        from armature.checkpoint import directory

        directory.publish = self._die_instead_of(directory.publish, trainer)

    def in_pointer(self, trainer: Trainer, module: LightningModule) -> None:
        """Die when the directory has its final name and `last` does not name it yet."""
        from armature.checkpoint import directory

        directory.write_last = self._die_instead_of(directory.write_last, trainer)

    # ------------------------------------------------------------ parts
    def _is_mine(self, trainer: Trainer) -> bool:
        return self.rank in (trainer.global_rank, EVERY_RANK) and not self.over

    def _strike(self, trainer: Trainer) -> None:
        note_strike(self.folder, Path(trainer.default_root_dir) / "checkpoints")

    def _note(self, trainer: Trainer, kind: str, step: int) -> None:
        with (self.folder / f"journal.{trainer.global_rank}").open("a") as file:
            file.write(f"{time.time():.3f} {kind} {step} {os.getpid()}\n")

    def _wait(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + LONGEST_HOLD
        while not until() and time.monotonic() < end:
            time.sleep(0.01)

    def _die_instead_of(self, usual: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
        def dying(*args: Any, **kwargs: Any) -> Any:
            if completed_batches(trainer) == self.at_step and self._is_mine(trainer):
                self._strike(trainer)
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*args, **kwargs)

        return dying
