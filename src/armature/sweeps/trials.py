"""The trials of a sweep, read from their run directories: values, state, metric, rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from armature import config
from armature.errors import ConfigError
from armature.launcher import run_state

OWN = ("run.", "sweep", "callbacks.prune", "resume")  # overrides that are no values of a sweep


@dataclass(frozen=True)
class Trial:
    number: int
    path: Path
    state: str  # finished, stopped (REASON), running or failed
    step: int | None
    metric: float | None  # of the best checkpoint; None: it has none
    values: dict[str, str]  # what was typed for it
    monitor: str  # what the metric is
    mode: str
    metrics: dict[str, float]  # of its end
    repeat: tuple[Any, Any]  # seed and fold


@dataclass(frozen=True)
class Sweep:
    """`trials` are ranked: those with a metric first, by it.

    Trials with different metrics are in order of number.
    """

    path: Path
    keys: tuple[str, ...]  # what differs between the trials
    trials: tuple[Trial, ...]
    asked: int  # trials that the command was to run, or as many as have begun

    @cached_property
    def goals(self) -> list[str]:
        return list(dict.fromkeys(f"{trial.monitor} ({trial.mode})" for trial in self.trials))

    @property
    def monitor(self) -> str:
        return self.trials[0].monitor if len(self.goals) == 1 else "metric"

    @cached_property
    def ranked(self) -> list[Trial]:
        return (
            [trial for trial in self.trials if trial.metric is not None]
            if len(self.goals) == 1
            else []
        )

    @property
    def finished(self) -> int:
        return sum(trial.state == "finished" for trial in self.trials)

    @property
    def headline(self) -> str:
        """How many trials have finished, and how they are ranked."""
        if len(self.goals) > 1:
            order = f"not ranked, since checkpoint.monitor differs: {', '.join(self.goals)}"
        else:
            order = (
                f"{self.monitor}, {'highest' if self.trials[0].mode == 'max' else 'lowest'} first"
            )
        return f"{self.finished} of {self.asked} trials finished; {order}"


def read(folder: Path, *, asked: int | None = None) -> Sweep | None:
    """Return the sweep in a directory, or None if no trial has begun.

    `asked`: the trials that it was to have.
    """
    found = sorted(
        int(path.name) for path in folder.iterdir() if path.name.isdecimal() and has_begun(path)
    )
    trials = []
    for number in found:
        path = folder / str(number)
        try:
            cfg = config.load(path / "config.yaml")
            monitor, mode = str(cfg.checkpoint.monitor), str(cfg.checkpoint.mode)
        except ConfigError:
            continue  # damaged
        summary = run_state.read_summary(path)
        found_metrics = summary.get("metrics", {})
        trials.append(
            Trial(
                number, path, run_state.state(path, summary), summary.get("global_step"),
                metric(path, monitor), _typed(path), monitor, mode,
                {name: value for name, value in found_metrics.items() if value is not None},
                (cfg.get("seed"), OmegaConf.select(cfg, "data.fold")),
            )
        )  # fmt: skip
    if not trials:
        return None
    keys = {key: None for trial in trials for key in trial.values}
    differ = tuple(key for key in keys if len({trial.values.get(key) for trial in trials}) > 1)
    if len({(trial.monitor, trial.mode) for trial in trials}) == 1:
        sign = -1 if trials[0].mode == "max" else 1
        trials.sort(
            key=lambda trial: (trial.metric is None, sign * (trial.metric or 0.0), trial.number)
        )
    return Sweep(folder, differ, tuple(trials), max(asked or 0, len(trials)))


def metric(path: Path, monitor: str) -> float | None:
    """Return the monitored metric of a run's best checkpoint; of its end, if none is kept."""
    summary = run_state.read_summary(path)
    best = summary.get("best_score")
    return best if best is not None else summary.get("metrics", {}).get(monitor)


def is_sweep(folder: Path) -> bool:
    return folder.is_dir() and any(
        path.name.isdecimal() and has_begun(path) for path in folder.iterdir()
    )


def has_begun(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "overrides.txt").is_file()


def newest_start(path: Path) -> list[str]:
    """Return the overrides of the newest start; each start appends its own."""
    return (
        (path / "overrides.txt")
        .read_text(encoding="utf-8", errors="replace")
        .split("\n\n")[-1]
        .splitlines()
    )


def _typed(path: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in newest_start(path))
    return {
        key.lstrip("+"): value for key, _, value in pairs if not key.lstrip("+").startswith(OWN)
    }


def table(sweep: Sweep) -> list[list[str]]:
    """Return the ranked table: a row of titles, and a row per trial."""
    rows = [["rank", "trial", sweep.monitor, *sweep.keys, "step", "state"]]
    ranked = sweep.ranked
    for rank, trial in enumerate(sweep.trials, start=1):
        metric = "–" if trial.metric is None else f"{trial.metric:.5g}"
        metric += "" if trial.monitor == sweep.monitor else f" {trial.monitor}"
        place = str(rank) if trial in ranked else "–"
        values = [short(trial.values.get(key, "–")) for key in sweep.keys]
        rows.append(
            [place, str(trial.number), metric, *values, str(trial.step or "–"), trial.state]
        )
    return rows


def short(value: str) -> str:
    """Return a number with five digits, and anything else as it is."""
    number = as_number(value)
    return value if number is None or len(value) <= 8 else f"{number:.5g}"


def as_number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def importance(sweep: Sweep) -> dict[str, float]:
    """Return the share of each key of a search in the differences of the metric, the largest first,
    by Optuna's PED-ANOVA; {} if too few trials tell.
    """
    from armature.sweeps import study

    if not study.has_study(sweep.path) or len(sweep.ranked) < 4 or len(sweep.keys) < 2:
        return {}
    optuna, opened = study.load_optuna(), study.open_study(sweep.path, create=False)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        return optuna.importance.get_param_importances(opened, evaluator=evaluator)
    except (RuntimeError, ValueError):  # too few trials, or all with one result
        return {}
