"""Texts and their classes, from CSV, JSON lines or Parquet files."""

import logging
from functools import cached_property
from typing import ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import override

from armature.data import tokenizer
from armature.data.base import Batch, Split
from armature.data.samples import Batched
from armature.data.table import ColumnData
from armature.data.text import padded
from armature.errors import ConfigError
from armature.models.loss import IGNORED

log = logging.getLogger(__name__)


class Texts(Batched):
    """Token ids (T,) and the class's number, if it is known.

    A batch is padded with -100 to its longest text.
    """

    def __init__(
        self,
        texts: list[str],
        ids: list[np.ndarray],
        targets: Tensor | None,
        *,
        context: int,
        multiple: int,
    ) -> None:
        self.texts, self.ids, self.targets = texts, ids, targets
        self.context, self.multiple = context, multiple

    def __len__(self) -> int:
        return len(self.ids)

    @override
    def batch(self, indices: list[int]) -> Batch:
        """Return inputs (B, T) and targets (B,), of int64.

        T is rounded up to `multiple`, and at most `context`.
        """
        inputs = padded(
            [self.ids[i] for i in indices], fill=IGNORED, most=self.context, multiple=self.multiple
        )
        targets = {} if self.targets is None else {"targets": self.targets[indices]}
        return {"inputs": inputs, **targets}

    def describe(self, index: int) -> dict[str, str]:
        """Return what a row of predictions says of the sample."""
        return {"text": self.texts[index]}


class LabeledTextData(ColumnData):
    """Token ids (B, T), padded with -100, and classes (B,), which are the labels in the order of
    `labels.ordered`.

    Each text is tokenized with the special tokens that its tokenizer adds, and cut to `context`
    tokens.

    Args:
        path, target: as of `ColumnData`.
        tokenizer: a folder that holds tokenizer.json.
        text: the column, or field, with the text.
        context: the most tokens of a text.
        multiple: T is the length of the batch's longest text, rounded up to a multiple of this.
        val_fraction, test_fraction: shares of the rows, drawn at random, always the same.
        fold, folds: hold out this one of so many parts of the other samples, not val_fraction.
    """

    model_sizes: ClassVar[dict[str, str]] = {"context": "context"}  # read before launch

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
        super().__init__(
            path, target, texts=[text], classes=True, val_fraction=val_fraction,
            test_fraction=test_fraction, fold=fold, folds=folds,
        )  # fmt: skip
        self.tokenizer_folder, self.text = tokenizer, text
        self.context, self.multiple = context, multiple

    @override
    def dataset(self, split: Split) -> Texts:
        indices, targets = self.rows(split)
        texts, ids = self._encoded
        return Texts(
            [texts[i] for i in indices.tolist()],
            [ids[i] for i in indices.tolist()],
            targets,
            context=self.context,
            multiple=self.multiple,
        )

    @cached_property
    def _encoded(self) -> tuple[list[str], list[np.ndarray]]:
        """The texts and their tokens. Raises ConfigError for one that has none."""
        texts = self._column(self.text, "text")[0].to_pylist()
        encoder = tokenizer.read(tokenizer.find(self.tokenizer_folder, key="data.tokenizer"))
        encoder.enable_truncation(self.context)  # keeps the special tokens at the end
        # so that a text that is missing, empty or no text is found below
        clean = [text if isinstance(text, str) and text.strip() else "" for text in texts]
        with tokenizer.all_cores():
            encoded = encoder.encode_batch(clean)
        for row, (text, each) in enumerate(zip(clean, encoded, strict=True), start=1):
            if not text or not each.ids:
                raise ConfigError(
                    f"data.path={self.path}, data row {row}: there is no text in column "
                    f"{self.text!r}. Type data.text=…, fill it in, or remove the row."
                )
        if cut := sum(bool(each.overflowing) for each in encoded):
            log.info("data.context=%d cuts %d of %d texts.", self.context, cut, len(texts))
        return texts, [np.array(each.ids, np.int32) for each in encoded]
