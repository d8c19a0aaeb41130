"""metrics.csv: one row per optimizer step, in order, each written once.

No value depends on the clock, so the file of an interrupted run can be compared with that of an
uninterrupted one. Values of a step may come at several times: what the module logs before the rows
of several steps, what a validation adds after them. So rows wait until a later step is complete,
and are written at most once per second, and before each validation and save: opening the file takes
longer than a short step.
"""

import csv
import io
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.utilities import rank_zero_only

from armature import files
from armature.errors import NotSaved
from armature.loggers import NoLogger

log = logging.getLogger(__name__)

SECONDS_BETWEEN_WRITES = 1.0
FIRST_COLUMNS = ["step", "epoch", "samples", "tokens", "lr", "train/loss", "train/grad_norm"]


class MetricsCSV(NoLogger):
    """Lightning logger that writes `<run_dir>/metrics.csv` on rank 0, numbers only.

    Attributes:
        step: optimizer steps made: the row of values that Lightning logs.
        trained: names of what the run has ended with, once it is tested.
        is_silent: set while hooks of the start, whose values the first start has logged, run again.
    """

    name_on_disk, keeps_newest = "metrics.csv", True

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.file = run_dir / self.name_on_disk
        self.step = 0
        self.trained: set[str] = set()
        self.is_silent = False
        self._columns: list[str] = []
        self._rows: dict[int, dict[str, Any]] = {}  # those that are not written yet, by step
        self._newest = 0  # the last step that is complete but for its validation
        self._next_write = 0.0
        self._failed = False

    @property
    def held(self) -> dict[str, Any]:
        """The newest row, which checkpoints hold."""
        return self._rows.get(self._newest, {})

    @held.setter
    def held(self, row: dict[str, Any]) -> None:
        self._newest = row.get("step", 0)
        self._rows = {self._newest: row} if row else {}

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: value for name, value in metrics.items() if name not in ("epoch", "step")}
        # hooks may pass tensors
        values = convert_tensors_to_scalars(self.beside_trained(values))
        # a smaller step: in on_fit_start of a resumed run, before `resume_from`
        if values and not self.is_silent and self.step >= self._newest:
            self._rows.setdefault(self.step, {"step": self.step}).update(values)

    def beside_trained(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values of a test under names that take no other's place: a test_step that calls
        validation_step logs val/loss, which is test/val/loss here.
        """
        return {f"test/{k}" if k in self.trained else k: value for k, value in values.items()}

    @rank_zero_only
    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Take the rows of complete steps, in their order."""
        for row in rows:
            self._newest = row["step"]
            self._rows[self._newest] = row | self._rows.get(self._newest, {})
        if time.monotonic() >= self._next_write:
            self.write_ready()

    @rank_zero_only
    def write_ready(self) -> None:
        """Write all rows but the newest, to which a validation may add values."""
        end = self._newest if self.keeps_newest else self._newest + 1
        self._write([step for step in self._rows if step < end])
        self._next_write = time.monotonic() + SECONDS_BETWEEN_WRITES

    @rank_zero_only
    def flush(self) -> None:
        """Write the newest row too.

        Raises:
            NotSaved: if the disk has no room for some rows.
        """
        if error := self._write([*self._rows]):
            raise NotSaved(
                f"{self.file} lacks {len(self._rows)} rows at its end, which could not be written "
                f"({error})."
            ) from error

    @rank_zero_only
    def resume_from(self, step: int) -> None:
        """Drop the rows after `step`, at which the checkpoint to resume from was saved."""
        self.step = step
        columns, rows = read(self.file)
        kept = []
        for row in rows:
            if int(row["step"]) == self._newest and self._rows:
                # values that validation or test have added to that row since
                self.held = {name: value for name, value in row.items() if value} | self.held
            elif int(row["step"]) <= step:
                kept.append(row)
        if columns:
            self._rewrite(columns, kept)
        elif self.file.exists():  # what a spreadsheet or an editor has made of it
            self.file.replace(f"{self.file}.old")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        untouched = not self._columns and self.file.exists()  # the error came before `resume_from`
        # after a success, the test adds its values to the last row
        if status == "failed" and not untouched:
            try:
                self.flush()
            except NotSaved as error:  # beside the error that ends the run
                log.error("%s", error)

    def _write(self, steps: list[int]) -> OSError | None:
        """Write rows; return an error after which they stay in memory."""
        if not steps:
            return None
        rows = [self._rows[step] for step in sorted(steps)]
        size = self.file.stat().st_size if self.file.exists() else 0
        names = dict.fromkeys([*self._columns, *(name for row in rows for name in row)])
        try:
            if len(names) > len(self._columns) or not size:
                first = [name for name in FIRST_COLUMNS if name in names]
                columns = [*(dict.fromkeys(first) | names)]
                self._rewrite(columns, [*read(self.file)[1], *rows])
            else:
                with self.file.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns, lineterminator="\n").writerows(rows)
        except OSError as error:
            if not self._failed:
                log.error(
                    "%s could not be written (%s). Its rows stay in memory until they can be.",
                    self.file,
                    error,
                )
            self._failed = True
            if self.file.exists():
                os.truncate(self.file, size)  # leave no partial row
            return error
        for step in steps:
            del self._rows[step]
        return None

    def _rewrite(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        files.replace(self.file, text.getvalue())
        self._columns = columns


def read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return column names and rows, without lines that a crash cut short."""
    if not file.is_file():
        return [], []
    with file.open(newline="", errors="replace") as stream:
        reader = csv.DictReader(stream)
        if "step" not in (columns := list(reader.fieldnames or [])):
            return [], []
        rows = [row for row in reader if None not in row.values() and None not in row]
        return columns, [row for row in rows if row["step"].isdecimal()]
