"""Which curves a run's columns become: raw values faint, smoothed ones over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from armature.pages.chart import Chart, Line, smooth
from armature.pages.history import History

SMOOTHED = 60  # fewer values are shown as they are
WINDOW_SHARE = 40  # the smoothing window is this part of the values
# charts of values under other names than ours: a callback may log a hundred of them
MOST_OTHERS = 24
PHASES = ("data", "forward", "backward", "optimizer", "other")


def metric(
    runs: Sequence[History],
    name: str,
    *,
    window: int | None = None,
    marks: bool = False,
) -> Chart:
    """Return one metric of several runs, each in its color; of one run, also with its restarts
    marked.

    Args:
        window: values to smooth over; None: a 40th of them, 1: no smoothing.
    """
    lines: list[Line] = []
    for i, run in enumerate(runs):
        xs, ys = run.curve(name)
        lines += curve(xs, ys, label=run.name if len(runs) > 1 else "", color=i, window=window)
    starts = (
        [(float(start["step"]), "restart") for start in runs[0].starts if start.get("step")]
        if marks
        else []
    )
    return Chart(title=name, lines=lines, marks=starts)


def curve(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    label: str = "",
    color: int = 0,
    window: int | None = None,
) -> list[Line]:
    """Return the lines of a curve: one, or the raw values and their mean."""
    if not xs:
        return []
    if window is None:
        window = (
            len(ys) // WINDOW_SHARE if len(ys) >= SMOOTHED and len(ys) // WINDOW_SHARE > 2 else 1
        )
    if window == 1:
        return [Line(xs=xs, ys=ys, label=label, color=color, dots=len(xs) <= 40)]
    raw = Line(xs=xs, ys=ys, color=color, width=1.0, opacity=0.3)
    return [raw, Line(xs=xs, ys=smooth(ys, window), label=label, color=color)]


def learning(run: History) -> list[Chart]:
    """Return the charts of what was learned: the loss, the module's own values, validation
    metrics.
    """
    names = [name for name in run.values if _many(run, name)]
    first = ["train/loss", *filter(run.is_of_validation, names), "train/grad_norm"]
    ordered = [n for n in dict.fromkeys(first) if n in names]
    others, left = some(n for n in names if n not in first and not n.startswith("test"))
    drawn = [metric([run], name, marks=True) for name in [*ordered, *others]]
    if left:
        drawn[-1] = replace(drawn[-1], note=left)
    validated = next((name for name in ("val/loss", "val_loss") if name in ordered), None)
    if validated is not None and "train/loss" in ordered:
        with_validation = [replace(line, color=1) for line in metric([run], validated).lines]
        both = [*drawn[0].lines[:-1], replace(drawn[0].lines[-1], label="train/loss")]
        both += [*with_validation[:-1], replace(with_validation[-1], label=validated)]
        drawn[0] = Chart(title="loss", lines=both, marks=drawn[0].marks)
        drawn = [each for each in drawn if each.title != validated]
    return drawn


def some(names: Iterable[str]) -> tuple[list[str], str]:
    """Return the columns that are drawn, and a note about others: ours all, and so many that the
    module logged.
    """
    names = list(names)
    ours = [name for name in names if name.startswith("train/")]
    others = [name for name in names if name not in ours]
    left = len(others) - MOST_OTHERS
    return [*ours, *others[:MOST_OTHERS]], f"{left} more in metrics.csv" if left > 0 else ""


def experts(run: History) -> list[Chart]:
    """Return the load of a mixture's experts: its extremes in every step, and each expert's in the
    last one.
    """
    found = [(name, *run.curve(f"experts/load_{name}")) for name in ("max", "min")]
    lines = [
        line
        for i, (name, xs, ys) in enumerate(found)
        for line in curve(xs, ys, label=name, color=i)
    ]
    title = "tokens of the most and the least used expert, times the mean"
    drawn = [Chart(title=title, lines=lines, from_zero=True)] if lines else []
    loads = run.summary.get("expert_load")
    blocks = [
        Line(xs=[*range(len(load))], ys=load, label=f"block {block}", color=i, dots=True)
        for i, (block, load) in enumerate(loads.items() if isinstance(loads, dict) else ())
        if isinstance(load, list) and all(isinstance(value, int | float) for value in load)
    ]
    if blocks:
        title = "tokens of each expert in the last step, times the mean"
        drawn.append(Chart(title=title, lines=blocks, x_label="expert", from_zero=True))
    return drawn


def _many(run: History, name: str) -> bool:
    return len(run.curve(name)[0]) > (0 if run.is_of_validation(name) else 1)


def schedule(run: History) -> list[Chart]:
    return [metric([run], "lr", window=1)] if run.curve("lr")[0] else []


def speed(run: History) -> list[Chart]:
    """Return throughput, the split of a step and its waiting for data."""
    drawn = []
    for name, title in (
        ("tokens_per_second", "tokens per second"),
        ("samples_per_second", "samples per second"),
    ):
        xs, ys = run.curve(name)
        if xs:
            drawn.append(Chart(title=title, lines=curve(xs, ys), from_zero=True))
            break
    phases = [(name, *run.curve(f"time/{name}")) for name in PHASES]
    lines = [
        Line(xs=xs, ys=[1e3 * y for y in ys], label=name, color=i)
        for i, (name, xs, ys) in enumerate(phases) if xs
    ]  # fmt: skip
    if lines:
        drawn.append(Chart(title="a step's time, ms", lines=lines, from_zero=True))
    elif run.curve("seconds_per_step")[0]:
        xs, ys = run.curve("seconds_per_step")
        waits = dict(zip(*run.curve("data_wait"), strict=True))
        data = [1e3 * y * waits.get(x, math.nan) for x, y in zip(xs, ys, strict=True)]
        whole = Line(xs=xs, ys=[1e3 * y for y in ys], label="whole step", color=0)
        drawn.append(
            Chart(
                title="a step's time, ms",
                lines=[whole, Line(xs=xs, ys=data, label="waiting for data", color=1)],
                from_zero=True,
            )
        )
    if run.curve("mfu")[0]:
        drawn.append(
            Chart(title="model FLOPs utilization", lines=curve(*run.curve("mfu")), from_zero=True)
        )
    return drawn


def memory(run: History) -> list[Chart]:
    """Return the GiB of the fullest rank over time, which callbacks=monitors logs."""
    names = [name for name in run.timings if name.startswith("memory/") and run.curve(name)[0]]
    labels = [name.removeprefix("memory/").removesuffix("_gib") for name in names]
    found = [run.curve(name) for name in names]
    lines = [Line(xs=xs, ys=ys, label=labels[i], color=i) for i, (xs, ys) in enumerate(found)]
    title = "memory of the fullest rank, GiB"
    return [Chart(title=title, lines=lines, from_zero=True)] if lines else []
