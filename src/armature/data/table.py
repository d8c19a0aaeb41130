"""Rows of CSV, JSON lines or Parquet files: numbers to learn from, and a column to predict."""

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
_ROW_NUMBERS = re.compile(r"|Unnamed: 0(\.\d+)*|__index_level_\d+__")


class Rows(Dataset[dict[str, Tensor]]):
    """Rows in memory: inputs (F,), and a class or number; without targets the inputs alone."""

    def __init__(self, inputs: Tensor, targets: Tensor | None) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, index: Any) -> dict[str, Tensor]:
        targets = {} if self.targets is None else {"targets": self.targets[index]}
        return {"inputs": self.inputs[index], **targets}

    __getitem__ = batch


class ColumnData(LabeledData):
    """Base class of rows of files, of which a column holds the targets. All are held in memory.

    Predictions are of all rows, and need no targets.

    Args:
        path: a file, folder, pattern or list of .csv (with a header), .jsonl, .jsonl.gz or .parquet
            files.
        target: the column to predict.
        texts: other columns, which stay texts as they are typed.
        classes: the target is a class: its values are numbered from 0 (`labels.ordered`). False:
            it is a number.
        held_out: arguments of `columns.split_indices`.
    """

    predict_split = "predict"

    def __init__(
        self,
        path: str | list[str],
        target: str,
        *,
        texts: list[str],
        classes: bool,
        **held_out: Any,
    ) -> None:
        super().__init__()
        self.path = path
        self.target, self.classes_are_targets, self.held_out = target, classes, held_out
        self._texts = [*texts, target] if classes else texts

    def rows(self, split: Split) -> tuple[Tensor, Tensor | None]:
        """Return the indices of a split's rows, and their targets, if they are known."""
        every = torch.arange(self._table.num_rows)
        if split == "predict" and not self._has_targets:
            return every, None
        targets = self._targets()
        indices = every[columns.split_indices(len(every), **self.held_out)[split]]
        return indices, targets[indices]

    @property
    def _has_targets(self) -> bool:
        if self.target not in self._table.column_names or self._table[self.target].null_count:
            return False
        return not self.classes_are_targets or self.knows(self._labels[0])

    @override
    def names(self) -> dict[str, list[str]]:
        return {"classes": ordered(self._labels[0])} if self.classes_are_targets else {}

    @cached_property
    def _table(self) -> Any:
        return columns.read(self.path, texts=self._texts)

    @cached_property
    def _labels(self) -> tuple[list[str], Any]:
        """The classes of the target column, and the index of each row's."""
        return columns.classes(*self._column(self.target, "target"))

    def _targets(self) -> Tensor:
        """Return classes, as the trained model numbers them, or numbers. Raises ConfigError."""
        if not self.classes_are_targets:
            return torch.from_numpy(columns.numbers(*self._column(self.target, "target")))
        names, indices = self._labels
        where = f"data.path={self.path}: column {self.target}"
        return torch.tensor(self.numbers(names, where=where))[torch.from_numpy(indices)]

    def _column(self, name: str, key: str) -> tuple[Any, str]:
        """Return a column, and where it is, for messages. `key` is to name it."""
        there = self._table.column_names
        if name not in there:
            spaced = [repr(each) if each != each.strip() else each for each in there]
            raise ConfigError(
                f"data.path={self.path} has no column {name}. Its columns: {', '.join(spaced)}. "
                f"Type data.{key}=…, or name them so in the file (in CSV with commas between)."
            )
        return self._table[name], f"data.path={self.path}: column {name}"


class TableData(ColumnData):
    """Rows of numbers (B, F), and classes (B,) int64 or numbers (B,) float32.

    Args:
        path, target, classes: as of `ColumnData`.
        features: the columns to learn from; None: all others.
        val_fraction, test_fraction: shares of the rows, drawn at random, always the same.
        fold, folds: hold out this one of so many parts of the other samples, not val_fraction.
    """

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
    ) -> None:
        super().__init__(
            path, target, texts=[], classes=classes, val_fraction=val_fraction,
            test_fraction=test_fraction, fold=fold, folds=folds,
        )  # fmt: skip
        self.features = features

    @override
    def dataset(self, split: Split) -> Rows:
        indices, targets = self.rows(split)
        return Rows(self._inputs[indices], targets)

    @override
    def names(self) -> dict[str, list[str]]:
        _ = self._inputs
        return {"features": self._features, **super().names()}

    @cached_property
    def _inputs(self) -> Tensor:
        found = [columns.numbers(*self._column(name, "features")) for name in self._features]
        return torch.from_numpy(np.stack(found, axis=1))

    @cached_property
    def _features(self) -> list[str]:
        """The columns to learn from, in the order in which the model gets them."""
        known, typed = (self.saved or {}).get("features"), self.features
        if known is not None and typed not in (None, known):
            raise ConfigError(
                f"data.features={typed}, but the model was trained with {known}. Leave "
                "data.features out."
            )
        features = known if typed is None else typed
        if features is None:  # all columns but the target
            self._column(self.target, "target")
            others = [name for name in self._table.column_names if name != self.target]
            features = [name for name in others if not _ROW_NUMBERS.fullmatch(name)]
            if features != others:
                log.info(
                    "data.path=%s: columns without a name hold row numbers of pandas, and are left "
                    "out. To learn from them, type data.features=…", self.path,
                )  # fmt: skip
        if not features or self.target in features:
            raise ConfigError(
                f"data.features={typed}: these are the columns to learn from, without the target "
                f"{self.target}; null: all others. Columns: {', '.join(self._table.column_names)}."
            )
        return features
