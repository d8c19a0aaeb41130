"""metrics.csv: one row per optimizer step, in order, each written once.

No value depends on the clock, so the file of an interrupted run can be compared with that of an
uninterrupted one. The newest row is held in memory until the next one comes, because validation
adds to it. The others are written at most
once per second, and before each validation and save: opening the file takes longer than a short
step.
"""

import csv
import io
import logging
import os
import time
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.utilities import rank_zero_only

from armature import files
from armature.errors import NotSaved
from armature.loggers import NoLogger

log = logging.getLogger(__name__)

# of a file: opening it and writing to it take longer than a short step
SECONDS_BETWEEN_WRITES = 1.0
FIRST_COLUMNS = ["step", "epoch", "samples", "tokens", "lr", "train/loss", "train/grad_norm"]


class MetricsCSV(NoLogger):
    """Lightning logger that writes `<run_dir>/metrics.csv` on rank 0, numbers only."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.file = run_dir / "metrics.csv"
        self.step = 0  # optimizer steps made: the row of values that Lightning logs
        self._columns: list[str] = []
        self._ready: list[dict[str, Any]] = []  # rows for the next write
        self._next_write = 0.0
        self._unwritten: list[dict[str, Any]] = []  # rows for which the disk had no room
        self.held: dict[str, Any] = {}  # the newest row; the checkpoint holds it
        self._early: dict[int, dict[str, Any]] = {}  # by step, values that came before their row
        # bytes of the file after this process's last write; fewer: somebody has deleted or emptied
        # it
        self._size = 0
        self.is_expected = False  # whether a run that resumes has a file
        # while hooks of the start, whose values the first start has logged, run again
        self.is_silent = False

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: value for name, value in metrics.items() if name not in ("epoch", "step")}
        values = convert_tensors_to_scalars(values)  # hooks may pass tensors
        if self.is_silent or self.step < self.held.get("step", 0):
            return  # the latter in on_fit_start of a resumed run, before `resume_from`
        # StepLog writes that row later, with several others
        if values and self.step > self.held.get("step", 0):
            self._early.setdefault(self.step, {}).update(values)
        elif values:
            self.write_rows([{"step": self.step, **values}])

    @rank_zero_only
    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Take rows in the order of their steps; values of the same step are merged into one
        row.
        """
        for row in rows:
            if self.held and self.held["step"] == row["step"]:
                self.held.update(row)
                continue
            if self.held:
                self._ready.append(self.held)
            self.held = {**row, **self._early.pop(row["step"], {})}
        self._write_if_due()

    def _write_if_due(self) -> None:
        if time.monotonic() >= self._next_write:
            self.write_ready()

    @rank_zero_only
    def write_ready(self) -> None:
        """Write all rows but the newest."""
        ready, self._ready = self._ready, []
        self._append(ready)
        self._next_write = time.monotonic() + SECONDS_BETWEEN_WRITES

    @rank_zero_only
    def flush(self) -> None:
        """Write the newest row too.

        Raises:
            NotSaved: if the disk has no room for some rows.
        """
        held, self.held, early, self._early = self.held, {}, self._early, {}
        self._ready += [held] if held else []
        self._ready += [{"step": step, **values} for step, values in early.items()]
        self.write_ready()
        if not self._unwritten:
            return
        try:
            self._write(self._unwritten)
        except OSError as error:
            rows = f"{len(self._unwritten)} row{'s' * (len(self._unwritten) > 1)}"
            raise NotSaved(
                f"{self.file} lacks {rows} at its end, which could not be written ({error})."
            ) from error

    @rank_zero_only
    def resume_from(self, step: int) -> None:
        """Drop the rows after `step`, at which the checkpoint to resume from was saved."""
        self.step = step
        self._columns, rows = self._read()
        held = self.held.get("step")
        for row in rows:  # values that validation or test have added to that row since
            if int(row["step"]) == held:
                self.held = {**{name: value for name, value in row.items() if value}, **self.held}
        kept = [row for row in rows if int(row["step"]) <= step and int(row["step"]) != held]
        last = int(kept[-1]["step"]) if kept else 0
        if self.is_expected and last < step - 1:
            self._report_lost(last, step - 1 if held == step else step)
        if self._columns:
            self._rewrite(kept)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        untouched = not self._columns and self.file.exists()  # the error came before `resume_from`
        # after a success, the test adds its values to the last row
        if status == "failed" and not untouched:
            try:
                self.flush()
            except NotSaved as error:  # beside the error that ends the run
                log.error("%s", error)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        rows = [*self._unwritten, *rows]
        if not rows:
            return
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            self._write(rows)
        except OSError as error:
            if not self._unwritten:
                log.error(
                    "%s could not be written (%s). Its rows stay in memory until they can be.",
                    self.file,
                    error,
                )
            self._unwritten = rows
            if self.file.exists():
                os.truncate(self.file, size)  # leave no partial row

    def _write(self, rows: list[dict[str, Any]]) -> None:
        new = [name for row in rows for name in row if name not in self._columns]
        lost = self._size > (self.file.stat().st_size if self.file.exists() else 0)
        if new or lost:
            have = self._read()[1]
            names = dict.fromkeys([*self._columns, *new])
            first = [name for name in FIRST_COLUMNS if name in names]
            columns, self._columns = (
                self._columns,
                [*first, *(name for name in names if name not in first)],
            )
            try:
                self._rewrite([*have, *rows])
            except OSError:
                self._columns = columns
                raise
            if lost:
                self._report_lost(int(have[-1]["step"]) if have else 0, rows[0]["step"] - 1)
        else:
            with self.file.open("a", newline="") as file:
                csv.DictWriter(file, self._columns).writerows(rows)
                self._size = file.tell()
        self._unwritten = []

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        files.replace(self.file, text.getvalue())
        self._size = len(text.getvalue().encode())

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Return column names and rows.

        A file that cannot be read is renamed, since training does not depend on it.
        """
        if not self.file.exists() or (self.file.is_file() and not self.file.stat().st_size):
            return [], []
        try:
            if not self.file.is_file():
                raise ValueError("it is no regular file")
            columns, rows = read(self.file)
            columns.index("step")  # ValueError
            for row in rows:
                int(row["step"])
            return columns, rows
        except (ValueError, KeyError, csv.Error) as error:
            # another encoding, no header, not a table
            damaged = self.file.with_name(f"{self.file.name}.damaged")
            log.error(
                "%s cannot be read (%r). It is renamed to %s, and a new one begins.",
                self.file,
                error,
                damaged,
            )
            os.replace(self.file, damaged)
            return [], []

    def _report_lost(self, last: int, step: int) -> None:
        """Report that rows after the step `last` and up to `step` are missing: somebody has removed
        them.
        """
        log.error(
            "%s was deleted, emptied or renamed: the rows of steps %d to %d are missing. Training "
            "does not need them.",
            self.file, last + 1, step,
        )  # fmt: skip


def read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return column names and rows, without a line that a crash cut short."""
    with file.open(newline="") as stream:
        reader = csv.DictReader(stream)
        rows = [row for row in reader if None not in row.values() and None not in row]
        return list(reader.fieldnames or []), rows
