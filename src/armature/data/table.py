"""Rows of CSV or Parquet files: numbers to learn from, and a column to predict."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import extras, sources
from armature.data.base import Split
from armature.data.labels import LabeledData, name_of, ordered
from armature.data.splits import split_indices
from armature.errors import ConfigError, error_line

log = logging.getLogger(__name__)
_ROW_NUMBERS = re.compile(
    r"|__index_level_\d+__"
)  # names that pandas gives to columns of row numbers
_NESTED = (np.ndarray, list, dict)
_LONGEST_CELL = 2**31 - 1  # characters; the module csv's own limit is 131,072
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
# a row after the last one of a file: a quote that is not closed takes it in
_END = "\0end of the file"


class Rows(Dataset[dict[str, Tensor]]):
    """Rows in memory: inputs (F,), and a class or number; without targets the inputs alone."""

    def __init__(self, inputs: Tensor, targets: Tensor | None) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch(index)

    def batch(self, indices: Any) -> dict[str, Tensor]:
        targets = {} if self.targets is None else {"targets": self.targets[indices]}
        return {"inputs": self.inputs[indices], **targets}


@dataclass
class Content:
    """What files hold: inputs (N, F), and of the column to predict numbers (N,), or the index of
    each row's class.
    """

    columns: list[str]
    features: list[str]
    inputs: Tensor
    targets: Tensor | None = None
    classes: list[str] = field(default_factory=list)
    problem: str | None = None  # why the column to predict cannot be learned from


class TableData(LabeledData):
    """Rows of numbers (B, F), and classes (B,) int64 or numbers (B,) float32.

    All rows are held in memory.

    Predictions need no target column.

    Args:
        path: a file, folder, pattern or list of .csv files (with a header) or .parquet files.
        target: the column to predict.
        features: the columns to learn from; None: all others.
        classes: the target is a class: its values are numbered from 0 (`labels.ordered`). False:
            it is a number.
        val_fraction, test_fraction: shares of the rows, drawn at random, always the same.
        loader: batch sizes and the other arguments of DataModule.
    """

    predict_split = "predict"  # all rows

    def __init__(
        self,
        *,
        path: str | list[str],
        target: str,
        features: list[str] | None = None,
        classes: bool = True,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        self.path = path if isinstance(path, str) else list(path)
        self.target, self.features = target, None if features is None else list(features)
        self.classes_are_targets = classes
        self.fractions = {"val_fraction": val_fraction, "test_fraction": test_fraction}

    @override
    def dataset(self, split: Split) -> Rows:
        content = self._content
        if split == "predict":
            return Rows(content.inputs, None if content.targets is None else self._targets())
        targets = self._targets()
        indices = torch.from_numpy(split_indices(len(targets), **self.fractions)[split])
        return Rows(content.inputs[indices], targets[indices])

    @override
    def names(self) -> dict[str, list[str]]:
        own = {"features": self._content.features}
        if not self.classes_are_targets:
            return own
        self._require_target()
        return {**own, "classes": self._content.classes}

    @cached_property
    def _content(self) -> Content:
        """What is kept of the files: their cells, as text, would take many times as much memory."""
        table = self._read()
        features = self._features(list(table))
        if missing := [name for name in features if name not in table]:
            raise ConfigError(self._lacks(missing, columns=list(table)))
        inputs = np.stack([_numbers(table[name], name, "features") for name in features], axis=1)
        content = Content(columns=list(table), features=features, inputs=torch.from_numpy(inputs))
        column = table.get(self.target)
        if column is None:
            content.problem = self._lacks([self.target], columns=list(table))
        elif (
            nested := next((each for each in column if isinstance(each, _NESTED)), None)
        ) is not None:
            content.problem = (
                f"data.target: column {self.target} holds a {type(nested).__name__} in each row, "
                "not one value. Name "
                "another column."
            )
        elif (empty := _first_empty(column)) is not None:
            content.problem = (
                f"data.target: column {self.target} is empty in data row {empty + 1}. Fill it in."
            )
        elif not self.classes_are_targets:
            content.targets = torch.from_numpy(_numbers(column, self.target, "target"))
        else:
            values, index = np.unique(column.astype(str), return_inverse=True)
            names = [str(name_of(value)) for value in values.tolist()]
            content.classes = ordered(names)
            numbers = {name: i for i, name in enumerate(content.classes)}
            content.targets = torch.tensor([numbers[name] for name in names])[index]
        return content

    def _read(self) -> dict[str, np.ndarray]:
        """Return the columns of all files by name."""
        tables = [(file.path, read(file.path)) for file in sources.find(self.path)]
        first, names = tables[0][0], sorted(tables[0][1])
        if other := next(
            ((file, sorted(table)) for file, table in tables if sorted(table) != names), None
        ):
            raise ConfigError(
                f"data.path={self.path}: the files differ in their columns: {first} has "
                f"{', '.join(names)}, and "
                f"{other[0]} {', '.join(other[1])}."
            )
        columns = {
            name: np.concatenate([table[name] for _, table in tables]) for name in tables[0][1]
        }
        if not len(next(iter(columns.values()), ())):
            raise ConfigError(f"data.path={self.path}: the files have no rows.")
        return columns

    def _features(self, columns: list[str]) -> list[str]:
        """Return the columns to learn from, in the order in which the model gets them."""
        typed = self.features
        known = (self.saved or {}).get("features")
        if known is not None and typed is not None and typed != known:
            raise ConfigError(
                f"data.features={typed}, but the model was trained with {known}. Leave "
                "data.features out."
            )
        if typed == []:
            raise ConfigError(
                "data.features=[]: there is nothing to learn from. Type data.features=null for all "
                "columns."
            )
        if (
            known is None and typed is None and self.target not in columns
        ):  # they are all columns but the target
            raise ConfigError(self._lacks([self.target], columns=columns))
        features = known or typed or self._all_features(columns)
        if not features:
            raise ConfigError(
                f"data.path={self.path} has no column but the target {self.target} to learn from."
            )
        if self.target in features:
            raise ConfigError(
                f"data.features={features} holds the target {self.target}. Leave it out."
            )
        return features

    def _all_features(self, columns: list[str]) -> list[str]:
        others = [name for name in columns if name != self.target]
        numbers = [name for name in others if _ROW_NUMBERS.fullmatch(name)]
        if numbers:
            log.info(
                "data.path=%s: column %s holds row numbers of pandas, and is left out. To learn "
                "from it, type "
                "data.features=…", self.path, ", ".join(map(repr, numbers)),
            )  # fmt: skip
        return [name for name in others if name not in numbers]

    def _lacks(self, missing: list[str], *, columns: list[str]) -> str:
        key = "data.target" if missing == [self.target] else "data.features"
        spaced = [repr(name) if name != name.strip() else name for name in columns]
        return (
            f"data.path={self.path} has no column {', '.join(missing)}. Its columns: "
            f"{', '.join(spaced)}. "
            f"Type {key}=…, or name the columns in the file so."
        )

    def _require_target(self) -> Tensor:
        if self._content.targets is None:
            raise ConfigError(self._content.problem or "")
        return self._content.targets

    def _targets(self) -> Tensor:
        """Return classes, as the trained model numbers them, or numbers. Raises ConfigError."""
        targets = self._require_target()
        if not self.classes_are_targets:
            return targets
        numbers = self.numbers(
            self._content.classes, where=f"data.path={self.path}, column {self.target},"
        )
        return torch.tensor(numbers)[targets]


def read(file: Path, *, kind: type = str) -> dict[str, np.ndarray]:
    """Return the columns of a file by name. Raises ConfigError."""
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.suffix != ".csv":
        raise ConfigError(f"data.path={file}: name .csv or .parquet files.")
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            header, lines = _rows(file, csv.reader(_lines(file, stream)))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path={file} is not CSV in UTF-8 ({error_line(error)}). {sources.CONVERT}"
        ) from error
    except (OSError, csv.Error) as error:
        raise ConfigError(
            f"data.path={file} cannot be read as CSV ({error_line(error)[:200]}). Convert or "
            "remove it."
        ) from error
    _require_unique(file, header, note=" The first line is taken for their names.")
    return {name: np.array([row[i] for row in lines], dtype=kind) for i, name in enumerate(header)}


def _lines(file: Path, stream: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a file, and _END."""
    for number, line in enumerate(stream, start=1):
        if "\0" in line:
            raise ConfigError(
                f"data.path={file}, line {number}: it holds a zero byte, which is not text. Remove "
                "it."
            )
        yield line
    yield _END


def _rows(file: Path, reader: Any) -> tuple[list[str], list[list[str]]]:
    """Return the names and the other rows of CSV, the last of which is _END.

    Raises ConfigError with a row's line.
    """
    header: list[str] = []
    rows: list[list[str]] = []
    line = 1  # of the row's beginning: a cell in quotes may hold line ends
    for row in reader:
        if row and row[-1].endswith(_END):
            if row != [_END]:
                raise ConfigError(
                    f"data.path={file}, line {line}: a quote is opened and never closed. Close it."
                )
            break
        if row and not header:
            header = row
            other = (
                next((each for each in _SEPARATORS if each in row[0]), None)
                if len(row) == 1
                else None
            )
            if other is not None:
                raise ConfigError(
                    f"data.path={file}: its columns are separated by {_SEPARATORS[other]}, not by "
                    "commas. Save it with "
                    "commas."
                )
        elif row and len(row) != len(header):
            raise ConfigError(
                f"data.path={file}, line {line}: {_cells(len(row))}, but the header has "
                f"{len(header)}. Mend the line; "
                "a cell that holds commas needs quotes."
            )
        elif row:
            rows.append(row)
        line = reader.line_num + 1
    if not header:
        raise ConfigError(f"data.path={file}: the file is empty. Name another, or remove it.")
    return header, rows


def _cells(number: int) -> str:
    return f"{number} cell{'s' * (number != 1)}"


def _require_unique(file: Path, names: list[str], *, note: str = "") -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"data.path={file}: two columns are named {', '.join(repeated)}. Rename one of "
            f"them.{note}"
        )


def _read_parquet(file: Path) -> dict[str, np.ndarray]:
    parquet = extras.load("pyarrow.parquet", needed_by=f"data.path={file}")
    try:
        _require_unique(file, parquet.read_schema(file).names)
        table = parquet.read_table(file)
        return {name: _decoded(table[name]).to_numpy() for name in table.column_names}
    except ConfigError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"data.path={file} cannot be read as Parquet ({error_line(error)[:200]}). It may be "
            "cut short, or of "
            "another kind: write it again, or remove it."
        ) from error


def _decoded(column: Any) -> Any:
    """Return a column of pyarrow's without its dictionary: to_numpy would take an empty cell as the
    last category.
    """
    types = extras.load("pyarrow.types", needed_by="Parquet files")
    return column.cast(column.type.value_type) if types.is_dictionary(column.type) else column


def _numbers(column: np.ndarray, name: str, key: str) -> np.ndarray:
    if column.dtype.kind in "Mm":
        raise ConfigError(
            f"data.{key}: column {name} holds times ({column.dtype}), which are no numbers. Leave "
            "the column out of "
            "data.features, or turn it into numbers first, such as days since a date."
        )
    try:
        with np.errstate(over="ignore"):  # reported below
            numbers = column.astype(np.float32)
    except (ValueError, TypeError):
        row = next(i for i, value in enumerate(column.tolist()) if not _is_number(value))
        if (value := _plain(column[row])) == "":
            raise ConfigError(
                f"data.{key}: column {name} is empty in data row {row + 1}. Fill it in."
            ) from None
        raise ConfigError(
            f"data.{key}: column {name} holds {value!r} in data row {row + 1}, which is no number. "
            "Leave "
            "the column out of data.features, or turn it into numbers first."
        ) from None
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ConfigError(
            f"data.{key}: column {name} holds {_plain(column[row])!r} in data row {row + 1}, which "
            "is no finite number "
            "of 32 bits. Fill it in, or leave the column or the row out."
        )
    return numbers


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _first_empty(column: np.ndarray) -> int | None:
    """Return the index of the first value that is missing, or None."""
    if column.dtype.kind in "US":
        missing = np.char.strip(column) == ""
    elif column.dtype.kind in "biufmM":
        missing = column != column  # NaN and NaT
    else:
        missing = np.array([name_of(value) is None for value in column])
    return int(np.flatnonzero(missing)[0]) if missing.any() else None


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True
