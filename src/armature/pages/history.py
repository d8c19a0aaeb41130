"""The files of a run, read for its pages.

A missing or damaged file only leaves its part of a page empty.
"""

import csv
import json
import math
import os
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from armature.config import read_raw
from armature.errors import ConfigError
from armature.launcher.run_state import read_summary

EVENTS = "report.jsonl"  # a line per start of the run and per sample, beside metrics.csv
WRITTEN = ("run.dir", "run.id", "run.git", "run.micro_batch_size")  # keys that no user sets
_OF_VALIDATION = re.compile(r"val(id|idation)?[/_.]")
Table = dict[str, list[float]]  # columns of equal length, NaN where a row has no value


@dataclass(frozen=True)
class History:
    """What is known of a run.

    Attributes:
        metrics, timings: the columns of metrics.csv and timings.csv.
        events: the lines of report.jsonl, without samples after the checkpoint from which a later
            start resumed.
        config: config.yaml by dotted key; references are not resolved, so that it holds nothing of
            the environment.
    """

    path: Path
    name: str
    metrics: Table
    timings: Table
    summary: dict[str, Any]
    events: list[dict[str, Any]]
    config: dict[str, Any]

    @property
    def values(self) -> list[str]:
        """Names of what was trained and measured: the columns of metrics.csv that are not about the
        step.
        """
        about = ("step", "epoch", "samples", "tokens", "lr")
        return [
            name for name in self.metrics if name not in about and not name.startswith("experts/")
        ]

    def is_of_validation(self, name: str) -> bool:
        """Return whether a value comes from validation: ours begin with val/, modules also log
        val_loss.
        """
        if name.startswith("train"):
            return False
        return (
            name == self.config.get("checkpoint.monitor") or _OF_VALIDATION.match(name) is not None
        )

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("event") == "start"]

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Return the values of a column of either file over the steps; rows without one are left
        out.
        """
        for table in (self.metrics, self.timings):
            if name in table and "step" in table:
                pairs = zip(table["step"], table[name], strict=True)
                # a value that is infinite or NaN is written as such and stays; an empty cell is
                # None
                found = [
                    (a, b) for a, b in pairs if a is not None and b is not None and math.isfinite(a)
                ]
                return [a for a, _ in found], [b for _, b in found]
        return [], []


def read(path: Path, *, name: str | None = None) -> History:
    """Return what the files of a run directory hold; `name`: instead of its own."""
    config = read_config(path / "config.yaml")
    return History(
        path,
        name or str(config.get("run.name") or path.name),
        metrics=read_table(path / "metrics.csv"),
        timings=read_table(path / "timings.csv"),
        summary=read_summary(path),
        events=read_events(path / EVENTS),
        config=config,
    )


def not_runs(paths: Iterable[Path]) -> list[str]:
    """Return a problem for each path that is no run directory."""
    kept = ("config.yaml", "metrics.csv")  # os.path.isfile raises for no name, however long
    wrong = [path for path in paths if not any(os.path.isfile(path / name) for name in kept)]
    return [
        f"{path}: not a run directory. Type outputs/<run.name>; scripts/runs.py lists them."
        for path in wrong
    ]


def read_table(file: Path, only: Container[str] | None = None) -> Table:
    """Return the columns of a file of numbers, or `only` some.

    A line that is being written, or damaged, is skipped.
    """
    columns: dict[str, list[Any]] = {}
    if not file.is_file():  # reading a pipe might never end
        return columns
    with (
        suppress(OSError, ValueError, csv.Error),
        file.open(newline="", encoding="utf-8", errors="replace") as stream,
    ):
        rows = csv.reader(line for line in stream if line.endswith("\n"))
        names = next(rows, [])
        if "step" not in names:
            return {}
        columns = {name: [] for name in names if only is None or name in only}
        places = [(names.index(name), values) for name, values in columns.items()]
        step = names.index("step")
        for row in rows:
            if len(row) == len(names) and row[step].isdecimal():
                for place, values in places:
                    values.append(_number(row[place]))
    return columns


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_events(file: Path) -> list[dict[str, Any]]:
    """Return the events, without samples that a later start, which resumed before them, has made
    void.
    """
    events: list[dict[str, Any]] = []
    for event in _lines(file):
        if event["event"] == "start":
            events = [
                each for each in events if each["event"] == "start" or each["step"] <= event["step"]
            ]
        elif (
            events and events[-1]["event"] == event["event"] and events[-1]["step"] == event["step"]
        ):
            # the same step again: the end of a run that validated there, or a start that added
            # nothing
            events.pop()
        events.append(event)
    return events


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        return
    with suppress(OSError), file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if (
                    isinstance(event, dict)
                    and isinstance(event.get("step"), int)
                    and isinstance(event.get("event"), str)
                ):
                    yield event


def read_config(file: Path) -> dict[str, Any]:
    """Return a configuration by dotted key, unresolved."""
    try:
        found = OmegaConf.to_container(read_raw(file), resolve=False)
    except (ConfigError, RecursionError):  # it may be nested without end
        return {}
    return {
        key: value
        for key, value in flat(found)
        if not f"{key}.".startswith(tuple(f"{name}." for name in WRITTEN))
    }


def flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a nested configuration; an empty group is a value."""
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node
