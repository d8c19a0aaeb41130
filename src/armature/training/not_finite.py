"""What a run does about a loss or a gradient that is not finite: `trainer.on_nan`.

Nothing waits for the device: the values are judged when the rows of metrics.csv are read, some
steps late. Rows are also read before each save and each validation, so no checkpoint holds what
such a step has left behind.
"""

import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from armature import files
from armature.errors import NotFinite
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training.progress import feed_of
from armature.training.trainer import Trainer

log = logging.getLogger(__name__)

FILE = "not_finite.json"
NAMED = 3  # skipped steps that are named; later ones are counted
SHOWN = 8  # samples in a message


class NotFiniteGuard(L.Callback):
    """Apply `trainer.on_nan` to the rows that are read. All ranks see the same rows.

    stop    end the run.
    skip    the strategy has left out the step's update (strategies/update_mask.py); count it.
    ignore  train on, after one warning.

    Args:
        run_dir: gets a file with each named step, its values, ranks and samples.
    """

    def __init__(self, policy: str, run_dir: Path) -> None:
        self.policy, self.run_dir, self.skipped = policy, run_dir, 0
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    def rows_read(
        self, trainer: Trainer, rows: list[dict[str, Any]], ranks: Mapping[int, Sequence[int]]
    ) -> None:
        """Judge rows of metrics.csv. Called by all ranks, with the same rows.

        Args:
            ranks: those whose own loss was not finite, by step.

        Raises:
            NotFinite: the run ends.
        """
        # with fp16 the loss scaler leaves out steps whose gradient overflows
        scales = StrategyMixin.of(trainer).scales_loss
        judged = ("train/loss",) if scales else ("train/loss", "train/grad_norm")
        for row in rows:
            values = {name: row[name] for name in judged if not math.isfinite(row.get(name, 0.0))}
            if not values:
                continue
            if self.policy == "ignore":
                self._warn(trainer, row["step"], values)
                continue
            self.skipped += self.policy == "skip"
            if self.policy == "stop" or self.skipped <= NAMED:
                self._name(trainer, row, values, ranks.get(row["step"], ()))

    def _warn(self, trainer: Trainer, step: int, values: Mapping[str, float]) -> None:
        if trainer.is_global_zero and not self._warned:
            log.warning(
                "%s is %s at step %d. trainer.on_nan=ignore trains on; later ones are not named.",
                *next(iter(values.items())),
                step,
            )
        self._warned = True

    def _name(
        self,
        trainer: Trainer,
        row: Mapping[str, Any],
        values: Mapping[str, float],
        ranks: Sequence[int],
    ) -> None:
        step, data = row["step"], feed_of(trainer)
        # from the position of the step's first sample
        indices = data.indices_of_step(row["samples"] - data.global_batch_size)
        samples = process_group.all_gather_object([*itertools.chain(*indices)])  # by rank
        own = sorted({sample for rank in ranks for sample in samples[rank]})
        event = {"step": step, "policy": self.policy, "ranks": [*ranks], "samples": samples}
        event |= {name: str(value) for name, value in values.items()}
        file = self.run_dir / FILE
        if trainer.is_global_zero:
            before = json.loads(file.read_text())["events"] if file.exists() else []
            files.replace(file, json.dumps({"events": [*before, event]}, indent=1) + "\n")
        what = " and ".join(f"{name} is {value}" for name, value in values.items())
        text = f"{what} at step {step} (trainer.on_nan={self.policy})"
        if ranks:
            shown = f"{', '.join(map(str, own[:SHOWN]))}{', …' if len(own) > SHOWN else ''}"
            text += f", on rank {', '.join(map(str, ranks))} (samples {shown})"
        if self.policy == "skip":
            if trainer.is_global_zero:
                more = " Later ones are only counted." if self.skipped == NAMED else ""
                log.warning("%s: its update was left out. %s has its samples.%s", text, file, more)
            return
        steps = str([*getattr(data, "skip_steps", ()), step]).replace(" ", "")
        raise NotFinite(
            f"{text}. {file} has all samples of the step. debug=nan shows the operation. The same "
            f"command with data.skip_steps={steps} resumes without these samples, with "
            "trainer.on_nan=skip without such updates; trainer.on_nan=ignore trains on."
        )
