"""Rows of CSV or Parquet files: numbers to learn from, and a column to predict."""

from __future__ import annotations

import csv
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import extras, sources
from armature.data.base import DataModule, Split
from armature.data.splits import split_indices
from armature.errors import ConfigError


class Rows(Dataset[dict[str, Tensor]]):
    """Rows in memory: inputs (F,), and a class or number."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        return {"inputs": self.inputs[indices], "targets": self.targets[indices]}


class TableData(DataModule):
    """Rows of numbers (B, F), and classes (B,) int64 or numbers (B,) float32. All rows are held in memory.

    Args:
        path: a file, folder, pattern or list of .csv files (with a header) or .parquet files.
        target: the column to predict.
        features: the columns to learn from; None: all others.
        classes: the target is a class: its sorted values are numbered from 0. False: it is a number.
        val_fraction, test_fraction: shares of the rows, drawn at random, always the same.
        loader: batch sizes and the other arguments of DataModule.
    """

    predict_split = "predict"  # all rows

    def __init__(
        self, *, path: str | list[str], target: str, features: list[str] | None = None, classes: bool = True,
        val_fraction: float = 0.1, test_fraction: float = 0.1, **loader: Any,
    ) -> None:  # fmt: skip
        super().__init__(**loader)
        self.path = path if isinstance(path, str) else list(path)
        self.target, self.features, self.classes = target, None if features is None else list(features), classes
        self.fractions = {"val_fraction": val_fraction, "test_fraction": test_fraction}

    @override
    def dataset(self, split: Split) -> Rows:
        inputs, targets = self._table
        indices = torch.from_numpy(split_indices(len(targets), **self.fractions)[split])
        return Rows(inputs[indices], targets[indices])

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        tables = [read(file.path) for file in sources.find(self.path)]
        names = list(tables[0])
        if other := next((list(table) for table in tables if list(table) != names), None):
            raise ConfigError(f"data.path={self.path}: the files differ in their columns: {names} and {other}.")
        features = self.features or [name for name in names if name != self.target]
        if missing := [name for name in [self.target, *features] if name not in names]:
            raise ConfigError(
                f"data.path={self.path} has no column {', '.join(missing)}. Its columns: {', '.join(names)}."
            )
        columns = {name: np.concatenate([table[name] for table in tables]) for name in [*features, self.target]}
        if not len(columns[self.target]):
            raise ConfigError(f"data.path={self.path}: the files have no rows.")
        inputs = np.stack([_numbers(columns[name], name, "features") for name in features], axis=1)
        if self.classes:
            _, targets = np.unique(columns[self.target].astype(str), return_inverse=True)
            return torch.from_numpy(inputs), torch.from_numpy(targets.astype(np.int64))
        return torch.from_numpy(inputs), torch.from_numpy(_numbers(columns[self.target], self.target, "target"))


def read(file: Path) -> dict[str, np.ndarray]:
    """Return the columns of a file by name. Raises ConfigError."""
    if file.suffix == ".parquet":
        parquet = extras.load("pyarrow.parquet", needed_by=f"data.path={file}")
        table = parquet.read_table(file)
        return {name: table[name].to_numpy() for name in table.column_names}
    if file.suffix != ".csv":
        raise ConfigError(f"data.path={file}: name .csv or .parquet files.")
    with file.open(encoding="utf-8-sig", newline="") as stream:
        header, *lines = [row for row in csv.reader(stream) if row] or [[]]
    if uneven := next((i for i, row in enumerate(lines, start=2) if len(row) != len(header)), None):
        raise ConfigError(f"data.path={file}: row {uneven} has not as many cells as the header ({len(header)}).")
    return {name: np.array([row[i] for row in lines], dtype=str) for i, name in enumerate(header)}


def _numbers(column: np.ndarray, name: str, key: str) -> np.ndarray:
    try:
        numbers = column.astype(np.float32)
    except (ValueError, TypeError):
        wrong = next((value for value in column.tolist() if not _is_number(value)), None)
        raise ConfigError(
            f"data.{key}: column {name} holds {wrong!r}, which is no number. Leave the column out of data.features, or "
            "turn it into numbers first."
        ) from None
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers))[0])
        raise ConfigError(f"data.{key}: column {name} holds {column[row].item()!r} in data row {row + 1}. Fill it in.")
    return numbers


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True
