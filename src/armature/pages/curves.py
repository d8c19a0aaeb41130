"""Which curves a run's columns become: raw values faint, means over them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from armature.pages.chart import BUCKETS, Chart, Line, buckets
from armature.pages.history import History

OF_SPEED = {
    "tokens_per_second": "tokens per second",
    "samples_per_second": "samples per second",
    "seconds_per_step": "seconds per step",
    "data_wait": "share of a step that waits for data",
    "mfu": "model FLOPs utilization",
}


def metric(
    runs: Sequence[History], name: str, *, title: str = "", raw: bool = False, **options: Any
) -> Chart:
    """Return one column of several runs, each in its color; `raw`: without its means."""
    lines: list[Line] = []
    for i, run in enumerate(runs):
        label = run.name if len(runs) > 1 else ""
        lines += curve(*run.curve(name), label=label, color=i, raw=raw)
    return Chart(title=title or name, lines=lines, **options)


def curve(
    xs: Sequence[float], ys: Sequence[float], *, label: str, color: int, raw: bool = False
) -> list[Line]:
    """Return the lines of a curve: one, or the raw values and their means."""
    if len(xs) <= BUCKETS:
        line = Line(xs=xs, ys=ys, label=label, color=color, dots=len(xs) <= 40)
        return [line] if xs else []
    extremes, means = ([*zip(*points, strict=True)] for points in buckets(xs, ys))
    outer = Line(xs=extremes[0], ys=extremes[1], color=color)
    if raw or not means:
        return [replace(outer, label=label)]
    faint = replace(outer, width=1.0, opacity=0.3)
    return [faint, Line(xs=means[0], ys=means[1], label=label, color=color)]


def together(run: History, columns: Mapping[str, str], title: str) -> list[Chart]:
    """Return a chart of several columns, by name and label; [] if the run has none of them."""
    lines = []
    for i, (name, label) in enumerate(columns.items()):
        lines += curve(*run.curve(name), label=label, color=i)
    return [Chart(title=title, lines=lines, from_zero=True)] if lines else []


def learning(runs: Sequence[History]) -> list[Chart]:
    """Return the charts of what was learned, of all runs together: the loss, validation metrics,
    the modules' own values.
    """

    def is_of_validation(name: str) -> bool:
        return any(run.is_of_validation(name) for run in runs)

    names = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.values)
        if not name.startswith("test")
        and max(len(run.curve(name)[0]) for run in runs) > (not is_of_validation(name))
    ]
    first = dict.fromkeys(["train/loss", *filter(is_of_validation, names), "train/grad_norm"])
    options: dict[str, Any] = {}
    if len(runs) == 1 and (marks := [each["step"] for each in runs[0].starts if each["step"]]):
        options = {"marks": marks, "note": "dashed: restarts"}
    ordered = [name for name in first | dict.fromkeys(names) if name in names]
    drawn = {name: metric(runs, name, **options) for name in ordered}
    validated = next((name for name in ("val/loss", "val_loss") if name in drawn), None)
    if len(runs) == 1 and validated is not None and "train/loss" in drawn:
        columns = {"train/loss": "train/loss", validated: validated}
        (both,) = together(runs[0], columns, "loss")
        drawn["train/loss"] = replace(both, **options, from_zero=False)
        del drawn[validated]
    return [*drawn.values()]


def experts(run: History) -> list[Chart]:
    """Return the load of the most and the least used expert of a mixture, times the mean."""
    columns = {f"experts/load_{name}": name for name in ("max", "min")}
    return together(run, columns, "tokens of the most and the least used expert, times the mean")


def speed(runs: Sequence[History]) -> list[Chart]:
    """Return the learning rate and throughput of all runs together."""
    found = [name for name in ("lr", *OF_SPEED) if any(run.curve(name)[0] for run in runs)]
    if {"tokens_per_second", "samples_per_second"} <= {*found}:
        found.remove("samples_per_second")
    return [
        metric(runs, name, raw=name == "lr", title=OF_SPEED.get(name, name), from_zero=name != "lr")
        for name in found
    ]


def memory(run: History) -> list[Chart]:
    """Return the GiB of the fullest rank over time, which callbacks=monitors logs."""
    names = [name for name in run.timings if name.startswith("memory/")]
    labels = {name: name.removeprefix("memory/").removesuffix("_gib") for name in names}
    return together(run, labels, "memory of the fullest rank, GiB")
