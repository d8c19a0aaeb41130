"""The answer of a sweep: at its end a ranked table is printed, and trials.csv and report.html are
written.
"""

import csv
import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from armature import files
from armature.errors import error_line, masked
from armature.pages import columns

log = logging.getLogger(__name__)
MOST_LINES = 21  # of a printed table, with its titles
# the directories of this process's sweeps, and how many trials they are to have, if it is known
asked: dict[Path, int | None] = {}


class Announce(Callback):
    """Hydra calls it (hydra.callbacks in train.yaml): remember the sweep's directory."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        asked[Path(str(config.hydra.sweep.dir))] = None


@contextmanager
def concluding() -> Iterator[None]:
    """Conclude the sweep that ran inside, also one that was stopped."""
    try:
        yield
    finally:
        while asked:
            folder, trials = asked.popitem()
            try:
                conclude(folder, asked=trials)
            except Exception as error:  # nothing that concerns the trials
                log.warning("The table of %s could not be made: %s", folder, error_line(error))


def conclude(folder: Path, *, asked: int | None = None) -> None:
    """Print the ranked table and write trials.csv and report.html into the sweep's directory.

    Args:
        asked: how many trials the command was to run; None: not known.
    """
    from armature.sweeps import repeats, report, trials

    sweep = trials.read(folder, asked=asked)
    if sweep is None:
        return
    rows, shares = trials.table(sweep), trials.importance(sweep)
    _write(folder / "trials.csv", rows)
    averages = repeats.averages(sweep)
    if averages:
        _write(folder / "configurations.csv", averages)
    files.replace(folder / "report.html", report.html(sweep, shares))
    lines = [f"\n{folder}: {sweep.headline}"]
    lines += columns.aligned(rows[:MOST_LINES])
    if len(rows) > MOST_LINES:
        lines.append(f"… and {len(rows) - MOST_LINES} more in {folder / 'trials.csv'}")
    if averages:
        lines += ["", "mean ± standard deviation over seeds and folds:"]
        lines += columns.aligned(averages[:MOST_LINES])
    if shares:
        lines.append(
            "importance: " + ", ".join(f"{key} {share:.0%}" for key, share in shares.items())
        )
    if sweep.ranked:
        lines.append(f"best: {sweep.ranked[0].path}; all of them: {folder / 'report.html'}")
    elif logged := sorted({name for trial in sweep.trials for name in trial.metrics}):
        lines.append(
            f"checkpoint.monitor={sweep.monitor}: no trial has logged it. Type another run.name, "
            f"and checkpoint.monitor= with one of {', '.join(logged)}."
        )
    print(masked("\n".join(lines)), file=sys.stderr)


def _write(file: Path, rows: list[list[str]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    files.replace(file, text.getvalue())
