"""Rows of CSV or Parquet files: numbers to learn from, and a column to predict."""

from __future__ import annotations

import logging
import re
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import columns
from armature.data.base import Split
from armature.data.labels import LabeledData, ordered
from armature.errors import ConfigError

log = logging.getLogger(__name__)
# names that pandas gives to columns of row numbers
_ROW_NUMBERS = re.compile(r"|__index_level_\d+__")


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
        fold, folds: hold out this one of so many parts of the other samples, not val_fraction.
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
        fold: int | None = None,
        folds: int | None = None,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        self.path = path if isinstance(path, str) else list(path)
        self.target, self.features = target, None if features is None else list(features)
        self.classes_are_targets = classes
        self.held_out: Any = {"val_fraction": val_fraction, "test_fraction": test_fraction}
        self.held_out |= {"fold": fold, "folds": folds}

    @override
    def dataset(self, split: Split) -> Rows:
        column = self._table[self.target] if self.target in self._table.column_names else None
        if split == "predict" and (column is None or column.null_count):
            return Rows(self._inputs, None)
        targets = self._targets()
        indices = torch.from_numpy(columns.split_indices(len(targets), **self.held_out)[split])
        return Rows(self._inputs[indices], targets[indices])

    @override
    def names(self) -> dict[str, list[str]]:
        _ = self._inputs
        own = {"features": self._features}
        return {**own, "classes": ordered(self._labels[0])} if self.classes_are_targets else own

    @cached_property
    def _table(self) -> Any:
        return columns.read(self.path, texts=[self.target] if self.classes_are_targets else [])

    @cached_property
    def _inputs(self) -> Tensor:
        found = [columns.numbers(self._column(name), name=name) for name in self._features]
        return torch.from_numpy(np.stack(found, axis=1))

    @cached_property
    def _labels(self) -> tuple[list[str], Any]:
        """The classes of the target column, and the index of each row's."""
        return columns.classes(self._column(self.target), name=self.target)

    def _targets(self) -> Tensor:
        """Return classes, as the trained model numbers them, or numbers. Raises ConfigError."""
        if not self.classes_are_targets:
            column = self._column(self.target)
            return torch.from_numpy(columns.numbers(column, name=self.target))
        names, indices = self._labels
        where = f"data.path={self.path}, column {self.target},"
        return torch.tensor(self.numbers(names, where=where))[torch.from_numpy(indices)]

    @cached_property
    def _features(self) -> list[str]:
        """The columns to learn from, in the order in which the model gets them."""
        known, typed = (self.saved or {}).get("features"), self.features
        if known is not None and typed not in (None, known):
            raise ConfigError(
                f"data.features={typed}, but the model was trained with {known}. Leave "
                "data.features out."
            )
        if known or typed:
            features = known or typed or []
        else:  # all columns but the target
            self._column(self.target)
            others = [name for name in self._table.column_names if name != self.target]
            features = [name for name in others if not _ROW_NUMBERS.fullmatch(name)]
            if features != others:
                log.info(
                    "data.path=%s: columns without a name hold row numbers of pandas, and are left "
                    "out. To learn from them, type data.features=…", self.path,
                )  # fmt: skip
        if typed == [] or not features or self.target in features:
            raise ConfigError(
                f"data.features={typed}: these are the columns to learn from, without the target "
                f"{self.target}; null: all others. Columns: {', '.join(self._table.column_names)}."
            )
        return features

    def _column(self, name: str) -> Any:
        there = self._table.column_names
        if name not in there:
            key = "target" if name == self.target else "features"
            spaced = [repr(each) if each != each.strip() else each for each in there]
            raise ConfigError(
                f"data.path={self.path} has no column {name}. Its columns: {', '.join(spaced)}. "
                f"Type data.{key}=…, or name the columns in the file so."
            )
        return self._table[name]
