"""Texts and their classes, from CSV, JSONL or Parquet files."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import columns, sources, tokenizer
from armature.data.base import Batch, Split
from armature.data.labels import LabeledData, name_of, ordered
from armature.errors import ConfigError
from armature.finetune.folder import TOKENIZER
from armature.models.loss import IGNORED

log = logging.getLogger(__name__)


class Texts(Dataset[Batch]):
    """Token ids (T,) and the class's number, if it is known.

    A batch is padded with -100 to its longest text.
    """

    def __init__(
        self,
        texts: list[str],
        ids: list[np.ndarray],
        targets: np.ndarray | None,
        *,
        context: int,
        multiple: int,
    ) -> None:
        self.texts, self.ids, self.targets = texts, ids, targets
        self.context, self.multiple = context, multiple

    def __len__(self) -> int:
        return len(self.ids)

    @override
    def __getitem__(self, index: int) -> Batch:
        return {name: value[0] for name, value in self.batch([index]).items()}

    def batch(self, indices: list[int]) -> Batch:
        """Return inputs (B, T) and targets (B,), of int64.

        T is rounded up to `multiple`, and at most `context`.
        """
        longest = max(len(self.ids[i]) for i in indices)
        length = min(self.context, -(-longest // self.multiple) * self.multiple)
        inputs = np.full((len(indices), length), IGNORED, np.int64)
        for row, i in enumerate(indices):
            inputs[row, : len(self.ids[i])] = self.ids[i]
        targets = (
            {} if self.targets is None else {"targets": torch.from_numpy(self.targets[indices])}
        )
        return {"inputs": torch.from_numpy(inputs), **targets}

    def describe(self, index: int) -> dict[str, str]:
        """Return what a row of predictions says of the sample."""
        return {"text": self.texts[index]}


class LabeledTextData(LabeledData):
    """Token ids (B, T), padded with -100, and classes (B,), which are the labels in the order of
    `labels.ordered`.

    Each text is tokenized with the special tokens that its tokenizer adds, and cut to `context`
    tokens. All texts are held in memory. Predictions are of all rows, and need no labels.

    Args:
        path: a file, folder, pattern or list of .csv (with a header), .jsonl, .jsonl.gz or .parquet
            files.
        tokenizer: a folder that holds tokenizer.json.
        text, target: the columns, or fields, with the text and its label.
        context: the most tokens of a text.
        multiple: T is the length of the batch's longest text, rounded up to a multiple of this.
        val_fraction, test_fraction: shares of the rows, drawn at random, always the same.
        fold, folds: hold out this one of so many parts of the other samples, not val_fraction.
    """

    model_sizes: ClassVar[dict[str, str]] = {"context": "context"}  # read before launch
    predict_split = "predict"

    def __init__(
        self,
        *,
        path: str | list[str],
        tokenizer: str,
        text: str = "text",
        target: str = "label",
        context: int = 256,
        multiple: int = 8,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        super().__init__()
        self.path = path if isinstance(path, str) else list(path)
        self.tokenizer_folder, self.text, self.target = tokenizer, text, target
        self.context, self.multiple = context, multiple
        self.held_out: Any = {"val_fraction": val_fraction, "test_fraction": test_fraction}
        self.held_out |= {"fold": fold, "folds": folds}

    @override
    def dataset(self, split: Split) -> Texts:
        texts, _, labels = self._columns
        indices = columns.split_indices(len(texts), **self.held_out)[split].tolist()
        targets = None
        if split != "predict" or (None not in labels and self.knows(self._labels())):
            where = f"data.path={self.path}, column {self.target},"
            targets = np.array(self.numbers(self._labels(), where=where), np.int64)[indices]
        return Texts(
            [texts[i] for i in indices],
            [self._ids[i] for i in indices],
            targets,
            context=self.context,
            multiple=self.multiple,
        )

    @override
    def names(self) -> dict[str, list[str]]:
        return {"classes": ordered(self._labels())}

    def _labels(self) -> list[str]:
        _, places, labels = self._columns
        if None in labels:
            raise ConfigError(
                f"{places[labels.index(None)]}: column {self.target!r} is missing, empty, or names "
                "no class. Type data.target=…, fill it in, or remove the row."
            )
        return [str(label) for label in labels]

    @cached_property
    def _columns(self) -> tuple[list[str], list[str], list[str | None]]:
        """The texts, where each is (for messages), and its class, or None."""
        files = sources.find(self.path)
        if all(file.path.name.removesuffix(".gz").endswith(".jsonl") for file in files):
            rows = [row for file in files for row in sources.json_lines(file)]
        else:
            table = columns.read(self.path, texts=[self.text, self.target])
            where = f"data.path={self.path}, data row"
            rows = [(f"{where} {i}", row) for i, row in enumerate(table.to_pylist(), start=1)]
        for where, row in rows:
            text = row.get(self.text) if isinstance(row, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(
                    f"{where}: {sources.shown(row)} has no text in column {self.text!r}. Type "
                    "data.text=…, fill it in, or remove the row."
                )
        if not rows:
            raise ConfigError(f"data.path={self.path}: the files have no rows.")
        found: list[Any] = [row for _, row in rows]
        labels = [name_of(row.get(self.target)) for row in found]
        return [row[self.text] for row in found], [where for where, _ in rows], labels

    @cached_property
    def _ids(self) -> list[np.ndarray]:
        texts, places, _ = self._columns
        folder = Path(self.tokenizer_folder)
        file = folder / TOKENIZER
        if not file.is_file():
            raise ConfigError(
                f"data.tokenizer={folder}: there is no {TOKENIZER} in it. Name the folder of the "
                "model, which must "
                "have one (transformers' save_pretrained of a fast tokenizer writes it)."
            )
        encoder = tokenizer.read(file)
        with tokenizer.all_cores():
            ids = [np.array(each.ids, np.int32) for each in encoder.encode_batch(texts)]
            longest, cut = (
                max(map(len, ids)),
                [i for i, n in enumerate(map(len, ids)) if n > self.context],
            )
            encoder.enable_truncation(self.context)  # keeps the special tokens at the end
            for i, each in zip(cut, encoder.encode_batch([texts[i] for i in cut]), strict=True):
                ids[i] = np.array(each.ids, np.int32)
        if (empty := next((i for i, own in enumerate(ids) if not len(own)), None)) is not None:
            raise ConfigError(
                f"{places[empty]}: the text has no tokens. Fill it in, or remove the row."
            )
        if cut:
            log.info(
                "data.context=%d cuts %d of %d texts, of up to %d tokens.",
                self.context,
                len(cut),
                len(ids),
                longest,
            )
        return ids
