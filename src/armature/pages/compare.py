"""Runs side by side: overlaid curves, the best value of each metric in bold, and where the
configurations differ.
"""

import math
import time
from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import Any

from armature.errors import masked
from armature.pages import columns, curves
from armature.pages.history import History
from armature.pages.page import charts, code, number, page, shown, table

MISSING = "–"
# words of a metric's name; LOWER's count where both occur
LOWER = ("loss", "error", "perplexity", "seconds of", "memory")
HIGHER = ("accuracy", "per second", "f1", "auroc")
IGNORED = ("run.name", "run.notes", "run.tags", "run.group", "resume")


def make(runs: Sequence[History]) -> str:
    """Return a page that compares runs."""
    head = ["", *(run.name for run in runs)]
    body = [
        f"<h1>{len(runs)} runs</h1>",
        f'<p class="quiet">as of {time.strftime("%Y-%m-%d %H:%M")}</p>',
        "<h2>Results</h2>",
        table(([escape(name), *map(_cell, cells)] for name, cells in _results(runs)), head),
        "<h2>Curves</h2>",
        charts(curves.learning(runs)),
        "<h2>Learning rate and speed</h2>",
        charts(curves.speed(runs)),
        "<h2>Configurations</h2>",
    ]
    rows = [[escape(key), *map(code, values)] for key, values in differences(runs).items()]
    body.append(
        table(rows, head) if rows else '<p class="quiet">All configurations are the same.</p>'
    )
    return masked(page(" · ".join(run.name for run in runs), body))


def rate(runs: Sequence[History]) -> str:
    return (
        "tokens_per_second"
        if any(run.curve("tokens_per_second")[0] for run in runs)
        else "samples_per_second"
    )


def results(runs: Sequence[History]) -> dict[str, list[float | None]]:
    """Return by name each run's value: the last of a training metric, the best of a validation
    metric, totals.
    """
    found = {"optimizer steps": [_value(run, "step", None) for run in runs]}
    for name in dict.fromkeys(name for run in runs for name in run.values):
        of_validation = any(run.is_of_validation(name) for run in runs)
        if of_validation or name.startswith(("train/loss", "train_loss", "test/", "test_")):
            aim = goal(name, runs) if of_validation else None
            found[name] = [_value(run, name, aim) for run in runs]
    speed = rate(runs)
    rates = [run.curve(speed)[1] for run in runs]
    found[speed.replace("_", " ")] = [median(each) if each else None for each in rates]
    for title, key, unit in (
        ("seconds of the newest start", "seconds", 1),
        ("peak memory, GiB", "peak_memory_bytes", 2**30),
    ):
        totals = [run.summary.get(key) for run in runs]
        found[title] = [each / unit if isinstance(each, int | float) else None for each in totals]
    return {name: values for name, values in found.items() if {*values} != {None}}


def _value(run: History, name: str, aim: str | None) -> float | None:
    ys = run.curve(name)[1]
    finite = [y for y in ys if math.isfinite(y)]
    if aim is None or not finite:
        return ys[-1] if ys else None
    return max(finite) if aim == "max" else min(finite)


def goal(name: str, runs: Sequence[History]) -> str | None:
    """Return max or min: what is better of a value.

    None: not known. The monitored metric's direction is configured.
    """
    for run in runs:
        if run.config.get("checkpoint.monitor") == name:
            return str(run.config.get("checkpoint.mode"))
    words = name.lower().replace("_", " ")
    if any(word in words for word in LOWER):
        return "min"
    return "max" if any(word in words for word in HIGHER) else None


def best(name: str, values: Sequence[float | None], runs: Sequence[History]) -> set[int]:
    """Return the indices of the best values; none if all are equal or the direction is not
    known.
    """
    aim = goal(name, runs)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if aim is None or len({*finite}) < 2:
        return set()
    top = max(finite) if aim == "max" else min(finite)
    return {i for i, value in enumerate(values) if value == top}


def _cell(shown: tuple[str, bool]) -> str:
    text, is_best = escape(shown[0]), shown[1]
    return f'<td class="number">{f"<b>{text}</b>" if is_best else text}</td>'


def _results(runs: Sequence[History]) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield each name with the text of each run's value, and whether it is the best."""
    for name, values in results(runs).items():
        top = best(name, values, runs)
        shown = [MISSING if value is None else number(value) for value in values]
        yield name, [(text, i in top) for i, text in enumerate(shown)]


def differences(runs: Sequence[History]) -> dict[str, list[Any]]:
    """Return the keys whose values differ among the runs, with each run's value.

    MISSING where a run has none.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in IGNORED)
    found = {key: [shown(run.config.get(key, MISSING)) for run in runs] for key in keys}
    commits = [
        str(run.starts[-1].get("commit") or MISSING)[:12] if run.starts else MISSING for run in runs
    ]
    return {
        key: values for key, values in {"commit": commits, **found}.items() if len(set(values)) > 1
    }


def text(runs: Sequence[History]) -> str:
    """Return the results and differences as a table for a terminal, the best values marked with
    *.
    """
    rows = [["", *(run.name for run in runs)]]
    rows += [
        [name, *(f"{cell}*" if best else cell for cell, best in cells)]
        for name, cells in _results(runs)
    ]
    rows += [[key, *values] for key, values in differences(runs).items()]
    cut = [[cell if len(cell) <= 40 else cell[:39] + "…" for cell in row] for row in rows]
    return "\n".join(columns.aligned(cut))
