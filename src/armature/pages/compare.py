"""Runs side by side: overlaid curves, the best value of each metric in bold, and where the
configurations differ.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

from armature.errors import masked
from armature.pages import chart, columns, curves
from armature.pages.history import History
from armature.pages.page import charts, number, page, plain_charts, shown, table

MISSING = "–"
# words of a metric's name; LOWER's count where both occur
LOWER = (
    "loss",
    "perplexity",
    "ppl",
    "bits_per_byte",
    "error",
    "err",
    "seconds",
    "memory",
    "mse",
    "rmse",
    "mae",
    "nll",
    "brier",
    "fid",
    "wer",
    "cer",
)
HIGHER = ("accuracy", "acc", "per_second", "mfu", "auroc", "auc", "f1", "precision", "recall", "r2")
IGNORED = ("run.name", "run.notes", "run.tags", "run.group", "resume")


def make(runs: Sequence[History]) -> str:
    """Return a page that compares runs."""
    runs = named_apart(runs)
    names = [name for name in _values(runs) if not name.startswith("test")]
    usual = ("train/loss", "val/loss", "val/accuracy")
    first = [
        *(name for name in usual if name in names),
        *(name for name in names if _is_of_validation(name, runs)),
    ]
    others, left = curves.some(name for name in names if name not in first)
    drawn = [curves.metric(runs, name) for name in dict.fromkeys([*first, *others])]
    drawn[-1:] = [replace(each, note=left) for each in drawn[-1:]]
    speed = [
        curves.metric(runs, name, window=1)
        for name in ("lr", rate(runs))
        if any(r.curve(name)[0] for r in runs)
    ]
    body = [
        f"<h1>{len(runs)} runs</h1>",
        f'<p class="quiet">as of {time.strftime("%Y-%m-%d %H:%M")}</p>',
        table(
            [[_swatch(i) + escape(run.name), escape(str(run.path))] for i, run in enumerate(runs)]
        ),
        "<h2>Results</h2>",
        table(*_results_table(runs)),
        "<h2>Curves</h2>",
        charts([each for each in drawn if each.lines], name="curves"),
        "<h2>Learning rate and speed</h2>",
        plain_charts(
            [
                replace(each, title=each.title.replace("_", " "), from_zero=each.title != "lr")
                for each in speed
            ]
        ),
        "<h2>Configurations</h2>",
        *_configurations(runs),
    ]
    return masked(page(" · ".join(run.name for run in runs), body))


def named_apart(runs: Sequence[History]) -> list[History]:
    """Return the runs, with those of one name called by their paths."""
    names = [run.name for run in runs]
    return [
        replace(run, config={**run.config, "run.name": str(run.path)})
        if names.count(run.name) > 1
        else run
        for run in runs
    ]


def rate(runs: Sequence[History]) -> str:
    return (
        "tokens_per_second"
        if any(run.curve("tokens_per_second")[0] for run in runs)
        else "samples_per_second"
    )


def _values(runs: Sequence[History]) -> list[str]:
    return [*dict.fromkeys(name for run in runs for name in run.values)]


def _is_of_validation(name: str, runs: Sequence[History]) -> bool:
    return any(run.is_of_validation(name) for run in runs)


def _swatch(i: int) -> str:
    return f'<span class="swatch" style="background:var(--c{i % chart.SERIES})"></span>'


def results(runs: Sequence[History]) -> dict[str, list[float | None]]:
    """Return by name each run's value: the last of a training metric, the best of a validation
    metric, totals.
    """
    found: dict[str, list[float | None]] = {"optimizer steps": [_last(run, "step") for run in runs]}
    for name in _values(runs):
        of_validation = _is_of_validation(name, runs)
        if of_validation or name.startswith(("train/loss", "train_loss", "test/", "test_")):
            aim = goal(name, runs) if of_validation else None
            found[name] = [_value(run, name, aim) for run in runs]
    found[rate(runs).replace("_", " ")] = [_total(run, rate(runs)) for run in runs]
    found["seconds of the newest start"] = [_total(run, "seconds") for run in runs]
    found["peak memory, GiB"] = [_gib(_total(run, "peak_memory_bytes")) for run in runs]
    return {
        name: values for name, values in found.items() if any(value is not None for value in values)
    }


def _last(run: History, name: str) -> float | None:
    _, ys = run.curve(name)
    return ys[-1] if ys else None


def _value(run: History, name: str, aim: str | None) -> float | None:
    _, ys = run.curve(name)
    finite = [y for y in ys if y - y == 0]
    if not ys or aim is None or not finite:
        return ys[-1] if ys else None
    return max(finite) if aim == "max" else min(finite)


def _total(run: History, key: str) -> float | None:
    value = run.summary.get(key)
    return float(value) if isinstance(value, int | float) else None


def _gib(value: float | None) -> float | None:
    return None if value is None else value / 2**30


def goal(name: str, runs: Sequence[History]) -> str | None:
    """Return max or min: what is better of a value.

    None: not known. The monitored metric's direction is configured.
    """
    for run in runs:
        if run.config.get("checkpoint.monitor") == name:
            return str(run.config.get("checkpoint.mode"))
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    # f1, and error of error2
    both = f"_{'_'.join(words)}_{'_'.join(word.rstrip('0123456789') for word in words)}_"
    if any(f"_{each}_" in both for each in LOWER):
        return "min"
    return "max" if any(f"_{each}_" in both for each in HIGHER) else None


def best(name: str, values: Sequence[float | None], runs: Sequence[History]) -> set[int]:
    """Return the indices of the best values; none if all are equal or the direction is not
    known.
    """
    aim, finite = (
        goal(name, runs),
        [value for value in values if value is not None and value - value == 0],
    )
    if aim is None or len(set(finite)) < 2:
        return set()
    top = max(finite) if aim == "max" else min(finite)
    return {i for i, value in enumerate(values) if value == top}


def _results_table(runs: Sequence[History]) -> tuple[list[list[str]], list[str]]:
    rows = []
    for name, values in results(runs).items():
        top = best(name, values, runs)
        cells = [MISSING if value is None else escape(_figure(name, value)) for value in values]
        rows.append(
            [
                escape(name),
                *(
                    f'<td class="number">{f"<b>{cell}</b>" if i in top else cell}</td>'
                    for i, cell in enumerate(cells)
                ),
            ]
        )
    return rows, ["", *(run.name for run in runs)]


def _figure(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "optimizer steps" else number(value)


def differences(runs: Sequence[History]) -> dict[str, list[Any]]:
    """Return the keys whose values differ among the runs, with each run's value.

    MISSING where a run has none.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in IGNORED)
    found = {key: _apart([run.config.get(key, MISSING) for run in runs]) for key in keys}
    commits = [
        str(run.starts[-1].get("commit") or MISSING)[:12] if run.starts else MISSING for run in runs
    ]
    return {
        key: values for key, values in {"commit": commits, **found}.items() if len(set(values)) > 1
    }


def _apart(values: list[Any]) -> list[str]:
    """Return how the values are shown: in all their digits, if fewer would make different ones the
    same.
    """
    short = [shown(value) for value in values]
    whole = [
        repr(value) if isinstance(value, float) else each
        for value, each in zip(values, short, strict=True)
    ]
    return whole if len(set(whole)) > len(set(short)) else short


def _configurations(runs: Sequence[History]) -> list[str]:
    found = differences(runs)
    if not found:
        return ['<p class="quiet">All configurations are the same.</p>']
    rows = [
        [escape(key), *(f"<code>{escape(str(value))}</code>" for value in values)]
        for key, values in found.items()
    ]
    return [table(rows, ["", *(run.name for run in runs)])]


def text(runs: Sequence[History]) -> str:
    """Return the results and differences as a table for a terminal, the best values marked with
    *.
    """
    runs = named_apart(runs)
    rows = [["", *(run.name for run in runs)]]
    for name, values in results(runs).items():
        top = best(name, values, runs)
        cells = [MISSING if value is None else _figure(name, value) for value in values]
        rows.append([name, *(f"{cell}*" if i in top else cell for i, cell in enumerate(cells))])
    rows += [[key, *(str(value) for value in values)] for key, values in differences(runs).items()]
    cut = [[cell if len(cell) <= 40 else cell[:39] + "…" for cell in row] for row in rows]
    return "\n".join(columns.aligned(cut))
