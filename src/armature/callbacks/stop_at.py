"""Send this run a signal at a chosen step, to try out a stop and a resume."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT

from armature.training.progress import completed_batches


class StopAt(Callback):
    r"""Let rank 0 signal itself at the end of a step.

    Once per run directory: the resumed run is not signaled again.

    python train.py run.name=mine \
        '+callbacks.stop_at={_target_:armature.callbacks.stop_at.StopAt,signals:{SIGTERM:4}}'

    Args:
        signals: optimizer step by signal name, such as {"SIGTERM": 4, "SIGKILL": 6}.
    """

    def __init__(self, signals: Mapping[str, int]) -> None:
        self.signals = {int(step): getattr(signal, name) for name, step in signals.items()}

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = completed_batches(trainer)
        if (
            not trainer.is_global_zero
            or step not in self.signals
            or (batch_idx + 1) % trainer.accumulate_grad_batches
        ):
            return
        # a file, since SIGKILL saves no state
        done = Path(trainer.default_root_dir) / f".stopped-at-{step}"
        if not done.exists():
            done.touch()
            os.kill(os.getpid(), self.signals[step])
