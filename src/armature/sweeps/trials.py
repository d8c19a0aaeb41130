"""The trials of a sweep, read from their run directories: values, state, metric, rank."""

import math
from dataclasses import dataclass, replace
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
    metric: float | None  # of the best checkpoint; None: it has none, or monitors another metric
    values: dict[str, str]  # what was typed for it
    metrics: dict[str, float]  # of its end
    repeat: tuple[Any, Any]  # seed and fold


@dataclass(frozen=True)
class Sweep:
    """`trials` are ranked: those with a metric first, by it.

    The metric is what the first of them monitors.
    """

    path: Path
    monitor: str
    mode: str
    keys: tuple[str, ...]  # what differs between the trials
    trials: tuple[Trial, ...]
    asked: int  # trials that the command was to run, or as many as have begun

    @property
    def ranked(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.metric is not None]

    @property
    def headline(self) -> str:
        """How many trials have finished, and how they are ranked."""
        finished = sum(trial.state == "finished" for trial in self.trials)
        order = "highest" if self.mode == "max" else "lowest"
        return f"{finished} of {self.asked} trials finished; {self.monitor}, {order} first"

    def order(self, metric: float | None) -> float:
        """Return a key that sorts metrics, the best first."""
        return math.inf if metric is None else -metric if self.mode == "max" else metric


def read(folder: Path, *, asked: int | None = None) -> Sweep | None:
    """Return the sweep in a directory, or None if no trial has begun.

    `asked`: the trials that it was to have.
    """
    trials, goals = [], []
    for path in begun(folder):
        try:
            cfg = config.load(path / "config.yaml")
        except ConfigError:
            continue  # damaged
        goals.append((cfg.checkpoint.monitor, cfg.checkpoint.mode))
        summary = run_state.read_summary(path)
        metrics = summary.get("metrics", {})
        trials.append(
            Trial(
                int(path.name), path, run_state.state(path, summary), summary.get("global_step"),
                metric(path, goals[0][0]) if goals[-1] == goals[0] else None, _typed(path),
                {name: value for name, value in metrics.items() if value is not None},
                (cfg.get("seed"), OmegaConf.select(cfg, "data.fold")),
            )
        )  # fmt: skip
    if not trials:
        return None
    keys = {key: None for trial in trials for key in trial.values}
    differ = tuple(key for key in keys if len({trial.values.get(key) for trial in trials}) > 1)
    monitor, mode = goals[0]
    sweep = Sweep(folder, monitor, mode, differ, tuple(trials), max(asked or 0, len(trials)))
    ranked = sorted(trials, key=lambda trial: sweep.order(trial.metric))
    return replace(sweep, trials=tuple(ranked))


def metric(path: Path, monitor: str) -> float | None:
    """Return the monitored metric of a run's best checkpoint; of its end, if none is kept."""
    summary = run_state.read_summary(path)
    best = summary.get("best_score")
    return best if best is not None else summary.get("metrics", {}).get(monitor)


def begun(folder: Path) -> list[Path]:
    """Return the directories of the trials that have begun, in order; [] if it is no sweep."""
    numbered = [
        file.parent
        for file in folder.glob("*/overrides.txt")
        if file.parent.name.isdecimal() and file.with_name("config.yaml").is_file()
    ]
    return sorted(numbered, key=lambda path: int(path.name))


def newest_start(path: Path) -> list[str]:
    """Return the overrides of the newest start; each start appends its own."""
    typed = (path / "overrides.txt").read_text(encoding="utf-8", errors="replace")
    return typed.split("\n\n")[-1].splitlines()


def _typed(path: Path) -> dict[str, str]:
    pairs = (line.lstrip("+").partition("=") for line in newest_start(path))
    return {key: value for key, _, value in pairs if not key.startswith(OWN)}


def table(sweep: Sweep) -> list[list[str]]:
    """Return the ranked table: a row of titles, and a row per trial."""
    rows = [["rank", "trial", sweep.monitor, *sweep.keys, "step", "state"]]
    for rank, trial in enumerate(sweep.trials, start=1):
        place, score = ("–", "–") if trial.metric is None else (str(rank), f"{trial.metric:.5g}")
        values = [short(trial.values.get(key, "–")) for key in sweep.keys]
        step = str(trial.step or "–")
        rows.append([place, str(trial.number), score, *values, step, trial.state])
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

    if not (sweep.path / study.JOURNAL).is_file() or len(sweep.ranked) < 4 or len(sweep.keys) < 2:
        return {}
    optuna, opened = study.load_optuna(), study.open_study(sweep.path)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        return optuna.importance.get_param_importances(opened, evaluator=evaluator)
    except (RuntimeError, ValueError):  # too few trials, or all with one result
        return {}
