"""What a run does about a loss or a gradient that is not finite: `trainer.on_nan`.

Nothing waits for the device: the values are judged when the rows of metrics.csv are read, some
steps late. Rows are
also read before each save and each validation, so no checkpoint holds what such a step has left
behind.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from omegaconf import DictConfig

from armature import config, files
from armature.checkpoint import resume
from armature.checkpoint.whole_optimizers import needs_closure
from armature.errors import ConfigError, NotFinite
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training.progress import data_of
from armature.training.replay import Replay, replay, weight_not_finite
from armature.training.trainer import Trainer

log = logging.getLogger(__name__)

FILE = "not_finite.json"
ROLLBACKS = 3  # of a run
REPLAYS = 3  # of steps that are skipped; each takes about as long as a step


class RolledBack(Exception):
    """Raised by all ranks together to begin again from the last checkpoint, without the samples of
    a step.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        super().__init__("trainer.on_nan=rollback")
        self.events = events


class NotFiniteGuard(L.Callback):
    """Apply `trainer.on_nan` to the rows that are read.

    All ranks see the same rows, so they do the same.

    stop        end the run. The weights are those that the step began with, where the strategy can
                keep them.
    skip        the strategy has left out the step's update (strategies/update_mask.py); count it.
    rollback    begin again from the last checkpoint without the step's samples, up to `ROLLBACKS`
                times.

    Args:
        run_dir: gets a file with every event: step, policy, samples and what its replay found.
        events: those of earlier processes of this run.
    """

    def __init__(
        self, policy: str, run_dir: Path, *, events: list[dict[str, Any]] | None = None
    ) -> None:
        self.policy, self.run_dir, self.events = policy, run_dir, list(events or [])
        self.skipped = 0

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["policy"] == "rollback"]

    def summary(self) -> str:
        """Return one line about the steps that did not count."""
        skipped, left_out = self.skipped, [event["step"] for event in self.rollbacks]
        parts = (
            [f"{skipped} step{'s' * (skipped > 1)} skipped (trainer.on_nan=skip)"]
            if skipped
            else []
        )
        if left_out:
            parts.append(
                f"rolled back from step {', '.join(map(str, left_out))} (trainer.on_nan=rollback)"
            )
        return f"not finite: {'; '.join(parts)}; see {self.run_dir / FILE}"

    def rows_read(self, trainer: Trainer, rows: list[dict[str, Any]]) -> None:
        """Judge rows of metrics.csv. Called by all ranks, with the same rows.

        Raises:
            NotFinite: the run ends.
            RolledBack: it begins again from the last checkpoint.
        """
        strategy = StrategyMixin.find(trainer)
        judged = (
            ("train/loss",)
            if strategy is not None and strategy.scales_loss
            else ("train/loss", "train/grad_norm")
        )
        bad = _not_finite(rows, judged)
        if not bad:
            return
        searches = any(map(needs_closure, trainer.optimizers))
        if searches and strategy is not None and weight_not_finite(strategy) is None:
            return  # the loss and the gradient were of weights that the line search only tried
        if self.policy == "skip":
            for row in bad:
                self._note_skipped(trainer, row, judged)
            return
        event, found, text = self._event(trainer, bad[0], judged)
        if self.policy == "rollback" and len(self.rollbacks) < ROLLBACKS:
            event["left_out"] = [
                list(part) for part in data_of(trainer).places_of_step(event["position"])
            ]
            self._record(trainer, event)
            if trainer.is_global_zero:
                log.warning(
                    "%s %s The run continues from %s without the step's samples.",
                    text,
                    found,
                    self._before(),
                )
            raise RolledBack(self.events)
        self._record(trainer, event)
        raise NotFinite(f"{text} {found} {self._remedy()}")

    def _note_skipped(self, trainer: Trainer, row: dict[str, Any], judged: tuple[str, ...]) -> None:
        self.skipped += 1
        if self.skipped > REPLAYS:
            return
        event, found, text = self._event(trainer, row, judged)
        self._record(trainer, event)
        if trainer.is_global_zero:
            more = " Later ones are only counted." if self.skipped == REPLAYS else ""
            log.warning("%s %s The step was left out.%s", text, found, more)

    def _event(
        self, trainer: Trainer, row: dict[str, Any], judged: tuple[str, ...]
    ) -> tuple[dict[str, Any], str, str]:
        """Return what happened in a step as facts, what its replay found, and both values as a
        sentence.
        """
        position = row["samples"] - data_of(trainer).global_batch_size
        values = {name: str(row[name]) for name in judged if not math.isfinite(row.get(name, 0.0))}
        found: Replay = replay(trainer, position=position)
        event = {"step": row["step"], "policy": self.policy, "position": position, **values}
        event |= {
            "found": found.text,
            **found.facts,
            "step_samples": self._samples(trainer, position),
        }
        what = " and ".join(f"{name} is {value}" for name, value in values.items())
        return event, found.text, f"{what} at step {row['step']} (trainer.on_nan={self.policy})."

    def _samples(self, trainer: Trainer, position: int) -> dict[str, list[int]]:
        """Return the indices of the step's samples, by the data rank that had them."""
        strategy = StrategyMixin.find(trainer)
        rank = trainer.global_rank if strategy is None else strategy.data_rank
        own = [index for indices in data_of(trainer).indices_of_step(position) for index in indices]
        of_ranks = dict(process_group.all_gather_object((rank, own)))
        return {str(rank): of_ranks[rank] for rank in sorted(of_ranks)}

    def _record(self, trainer: Trainer, event: dict[str, Any]) -> None:
        self.events.append(event)
        if trainer.is_global_zero:
            files.replace(self.run_dir / FILE, json.dumps({"events": self.events}, indent=1) + "\n")

    def _before(self) -> str:
        file = self.run_dir / "config.yaml"
        checkpoint = resume.last_checkpoint(
            self.run_dir, config.load(file) if file.is_file() else None
        )
        return (
            str(checkpoint)
            if checkpoint is not None
            else "the start, since there is no checkpoint yet,"
        )

    def _remedy(self) -> str:
        file = self.run_dir / FILE
        if self.policy == "rollback":
            return (
                f"The run was rolled back {ROLLBACKS} times already, at steps "
                f"{', '.join(str(event['step']) for event in self.rollbacks[:ROLLBACKS])}, so the "
                "data are hardly to "
                "blame: try a lower learning rate, or look for the cause with debug=nan. "
                f"{file} has the steps' samples."
            )
        return (
            f"The last checkpoint is {self._before()}. {file} has the step's samples. Look at them "
            "and at the learning "
            "rate; debug=nan shows the operation. The same command with trainer.on_nan=rollback "
            "resumes and leaves "
            "these samples out, with trainer.on_nan=skip it leaves out such updates, and with "
            "trainer.on_nan=ignore it "
            "trains on."
        )


def begin(
    cfg: DictConfig, data: Any, strategy: Any, *, resumes: bool, events: list[dict[str, Any]] | None
) -> NotFiniteGuard:
    """Return the guard of a run, and tell the data and the strategy what follows from its events
    and its policy.

    Args:
        resumes: whether the run continues from a checkpoint of its own.
        events: of attempts of this process; None: what rank 0's run directory says, if the run
            resumes.
    """
    policy, run_dir = cfg.trainer.on_nan, Path(cfg.run.dir)
    if events is None:
        events = process_group.broadcast_object(read(run_dir) if resumes else [])
    data.left_out = left_out(events)
    if isinstance(strategy, StrategyMixin):
        strategy.on_nan = policy
    elif policy == "skip":
        raise ConfigError(
            f"trainer.on_nan=skip: {type(strategy).__name__} is none of armature.strategies, so no "
            "update can be left "
            "out. Type trainer.on_nan=rollback, or trainer.on_nan=stop."
        )
    return NotFiniteGuard(policy, run_dir, events=events)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events of earlier processes of a run; none if the file is missing or damaged."""
    try:
        return list(json.loads((run_dir / FILE).read_text(encoding="utf-8"))["events"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def left_out(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the parts of the order of samples that events have excluded, for
    `DataModule.left_out`.
    """
    return sorted(
        {(start, length) for event in events for start, length in event.get("left_out", [])}
    )


def _not_finite(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [row for row in rows if any(not math.isfinite(row.get(name, 0.0)) for name in names)]
