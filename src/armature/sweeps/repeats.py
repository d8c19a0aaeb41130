"""Runs of one configuration with several seeds and folds, as statistics: mean ± standard deviation,
and the mean paired difference of two configurations with its 95% interval.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from armature.pages import columns
from armature.sweeps.trials import Sweep, Trial, short

KEYS = ("seed", "data.fold")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Configuration:
    """Finished trials that differ in nothing but seed and fold."""

    values: dict[str, str]  # what was typed for all of them
    trials: list[Trial]
    monitor: str

    def metric(self, name: str) -> dict[tuple[int, int | None], float]:
        """Return the final values of a metric by seed and fold."""
        return {trial.repeat: trial.metrics[name] for trial in self.trials if name in trial.metrics}


def configurations(sweep: Sweep) -> list[Configuration]:
    """Return the configurations, the best mean of the monitored metric first."""
    groups: dict[tuple[tuple[str, str], ...], list[Trial]] = defaultdict(list)
    for trial in sweep.trials:
        if trial.state == "finished":
            fixed = {key: value for key, value in trial.values.items() if key not in KEYS}
            groups[tuple(fixed.items())].append(trial)

    def order(each: Configuration) -> float:
        values = each.metric(sweep.monitor).values()
        return sweep.order(fmean(values) if values else None)

    found = (
        Configuration(dict(values), members, sweep.monitor) for values, members in groups.items()
    )
    return sorted(found, key=order)


def names(found: Sequence[Configuration]) -> list[str]:
    """Return the metrics of validation and test, the monitored one first."""
    first = dict.fromkeys(each.monitor for each in found)
    others = dict.fromkeys(
        name
        for each in found
        for trial in each.trials
        for name in trial.metrics
        if not name.startswith("train")
    )
    return [name for name in first | others if name in others]


def table(found: Sequence[Configuration]) -> list[list[str]]:
    """Return a row of titles, and a row per configuration."""
    keys = dict.fromkeys(key for each in found for key in each.values)
    differ = [key for key in keys if len({each.values.get(key) for each in found}) > 1]
    metrics = names(found)
    rows = [[*differ, "runs", *metrics]]
    for each in found:
        typed = [short(each.values.get(key, "–")) for key in differ]
        runs = len(each.trials)
        spreads = [spread(each.metric(name).values(), runs) for name in metrics]
        rows.append([*typed, str(runs), *spreads])
    return rows


def averages(sweep: Sweep) -> list[list[str]]:
    """Return the table of a sweep whose trials repeat a configuration; [] if none does."""
    found = configurations(sweep)
    return table(found) if any(len(each.trials) > 1 for each in found) else []


def compare(found: Sequence[Configuration], labels: Sequence[str]) -> list[str]:
    """Return lines that compare each configuration with the first."""
    keys = (
        "seed and fold" if any(trial.repeat[1] is not None for trial in found[0].trials) else "seed"
    )
    lines = columns.aligned(
        [[title, *row] for title, row in zip(["", *labels], table(found), strict=True)]
    )
    for other, label in zip(found[1:], labels[1:], strict=True):
        rows = [["", "mean difference", "95% interval", "pairs"]]
        rows += [[name, *difference(found[0], other, name)] for name in names(found)]
        lines += ["", f"{label} minus {labels[0]}, paired by {keys}:", *columns.aligned(rows)]
    return lines


def spread(values: Iterable[float], runs: int) -> str:
    """Return mean ± standard deviation of the sample, and of how many runs if some have none."""
    numbers = [*values]
    if not numbers:
        return "–"
    deviation = f" ± {stdev(numbers):.2g}" if len(numbers) > 1 else ""
    count = f" ({len(numbers)})" if len(numbers) < runs else ""
    return f"{fmean(numbers):.4g}{deviation}{count}"


def difference(one: Configuration, other: Configuration, name: str) -> tuple[str, str, str]:
    """Return the mean of `other` minus `one` over equal seeds and folds, its 95% interval, and the
    number of pairs.
    """
    here, there = one.metric(name), other.metric(name)
    found = [there[repeat] - here[repeat] for repeat in here if repeat in there]
    if not found:
        return "–", "–", "0"
    mean = fmean(found)
    if len(found) == 1:
        return f"{mean:+.4g}", "–", "1"
    half = student_t(len(found) - 1) * stdev(found) / math.sqrt(len(found))
    return f"{mean:+.4g}", f"{mean - half:+.4g} to {mean + half:+.4g}", str(len(found))


def student_t(freedom: int) -> float:
    """Return the t that |T| stays below with probability CONFIDENCE (Abramowitz and Stegun
    26.7.3-4).
    """
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / √freedom
    while high - low > 1e-15:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _within(angle: float, freedom: int) -> float:
    odd = freedom % 2
    term, total = math.sin(angle) * (math.cos(angle) if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    return 2 / math.pi * (angle + total) if odd else total
