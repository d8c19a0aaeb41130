"""Texts and their classes, from CSV, JSONL or Parquet files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import sources, table, tokenizer
from armature.data.base import Batch, Split
from armature.data.labels import LabeledData, name_of, ordered
from armature.data.splits import split_indices
from armature.errors import ConfigError
from armature.finetune.folder import TOKENIZER
from armature.models.loss import IGNORED

log = logging.getLogger(__name__)
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Content:
    """What the files hold: texts, where each is (for messages), and labels, or why they cannot be
    learned from.
    """

    texts: list[str]
    places: list[str]
    labels: list[str]
    problem: str | None


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
        loader: batch sizes and the other arguments of DataModule.
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
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        if found := [
            f"data.{key}={value}: must be a whole number of at least 1."
            for key, value in (("context", context), ("multiple", multiple))
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]:
            raise ConfigError(found)
        self.path = path if isinstance(path, str) else list(path)
        self.tokenizer_folder, self.text, self.target = tokenizer, text, target
        self.context, self.multiple = context, multiple
        self.fractions = {"val_fraction": val_fraction, "test_fraction": test_fraction}

    @override
    def dataset(self, split: Split) -> Texts:
        content = self._content
        indices = split_indices(len(content.texts), **self.fractions)[split].tolist()
        is_needed = split != "predict" or (content.problem is None and self.knows(content.labels))
        targets = (
            np.array(self.numbers(self._labels(), where=self._where), np.int64)[indices]
            if is_needed
            else None
        )
        ids = self._ids
        return Texts(
            [content.texts[i] for i in indices],
            [ids[i] for i in indices],
            targets,
            context=self.context,
            multiple=self.multiple,
        )

    @override
    def names(self) -> dict[str, list[str]]:
        return {"classes": ordered(self._labels())}

    @property
    def _where(self) -> str:
        return f"data.path={self.path}, column {self.target},"

    def _labels(self) -> list[str]:
        if self._content.problem is not None:
            raise ConfigError(self._content.problem)
        return self._content.labels

    def _lacks(self, key: str, columns: list[str]) -> str:
        return (
            f"data.path={self.path}: no column {getattr(self, key)!r} (there: "
            f"{', '.join(columns) or 'none'}). Type "
            f"data.{key}=…"
        )

    @cached_property
    def _ids(self) -> list[np.ndarray]:
        content = self._content
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
            ids = [np.array(each.ids, np.int32) for each in encoder.encode_batch(content.texts)]
            longest, cut = (
                max(map(len, ids)),
                [i for i, own in enumerate(ids) if len(own) > self.context],
            )
            encoder.enable_truncation(self.context)  # keeps the special tokens at the end
            for i, each in zip(
                cut, encoder.encode_batch([content.texts[i] for i in cut]), strict=True
            ):
                ids[i] = np.array(each.ids, np.int32)
        if (empty := next((i for i, own in enumerate(ids) if not len(own)), None)) is not None:
            raise ConfigError(
                f"{content.places[empty]}: the text has no tokens. Fill it in, or remove the row."
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

    @cached_property
    def _content(self) -> Content:
        texts, places, labels, columns = list[str](), list[str](), list[str](), dict[str, None]()
        problem: str | None = None
        for where, row in self._rows():
            columns |= dict.fromkeys(row)
            if self.text not in row:
                raise ConfigError(f"{where}: {self._lacks('text', [*row])}")
            if not isinstance(text := row[self.text], str) or not text.strip():
                raise ConfigError(
                    f"{where}: column {self.text!r} holds {text!r}, which is no text. Fill it in, "
                    "or remove the row."
                )
            if any(map(_SURROGATES.search, (text, str(row.get(self.target))))):
                raise ConfigError(f"{where}: half a surrogate pair, which is not text. Remove it.")
            texts.append(str(text))
            places.append(where)
            label = name_of(row.get(self.target))
            if label is not None:
                labels.append(label)
            elif problem is None:
                problem = (
                    f"{where}: no column {self.target!r}, which other rows have. Add it, or "
                    "remove the row."
                )
                if self.target in row:
                    problem = (
                        f"{where}: column {self.target!r} holds {row[self.target]!r}, which names "
                        "no class. Fill it "
                        "in, or remove the row."
                    )
        if not texts:
            raise ConfigError(f"data.path={self.path}: the files have no rows.")
        if self.target not in columns:
            problem = self._lacks("target", [*columns])
        return Content(texts, places, labels, problem)

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield where each row is, for messages, and its values by column."""
        for file in sources.find(self.path):
            name = file.path.name
            if name.removesuffix(".gz").endswith(".jsonl"):
                for where, row in sources.json_lines(file):
                    if not isinstance(row, dict):
                        raise ConfigError(
                            f"{where}: {sources.shown(row)} is no object with {self.text!r}. "
                            "Correct the line."
                        )
                    yield where, row
            elif file.path.suffix in (".csv", ".parquet"):
                columns = table.read(
                    file.path, kind=object
                )  # str gives each cell the size of the longest
                for number, values in enumerate(zip(*columns.values(), strict=True), start=1):
                    yield (
                        f"data.path: {file.path}, data row {number}",
                        dict(zip(columns, values, strict=True)),
                    )
            else:
                raise ConfigError(f"data.path={file.path}: name .csv, .jsonl or .parquet files.")
