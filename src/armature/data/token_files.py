"""Token ids that other tools have written: nanoGPT's train.bin and val.bin, and Megatron's pairs of
.bin and .idx.
"""

from __future__ import annotations

import hashlib
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import tokenizer
from armature.data.base import Batch, Split
from armature.data.text import TokenData, Windows
from armature.errors import ConfigError
from armature.models.loss import IGNORED

MEGATRON = b"MMIDIDX\x00\x00"
_CHECKED_FIRST = 1 << 20  # tokens of each split that are checked before a run
_NUMPY = b"\x93NUMPY"
_HEAD = struct.Struct("<QBQ")  # version, type of the tokens, number of sequences
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's codes


class TokenFiles:
    """Tokens of each split, memory-mapped.

    Args:
        path: a folder with train.bin, val.bin and perhaps test.bin; or one .bin file, whose end is
            held out.
        dtype: of the tokens, if there is no .idx file beside them; nanoGPT writes uint16.
        vocab_size: tokens of the model.
        val_fraction, test_fraction: shares of a single file.
        tokenizer: the tokenizer.json that made the tokens, for generate.py; None: there is none.
    """

    def __init__(
        self,
        path: str,
        *,
        context: int,
        vocab_size: int,
        dtype: str = "uint16",
        val_fraction: float = 0.01,
        test_fraction: float = 0.01,
        tokenizer: str | None = None,
    ) -> None:
        self.path, self.context, self.vocab_size, self.dtype = (
            Path(path).expanduser(),
            context,
            vocab_size,
            dtype,
        )
        self.val_fraction, self.test_fraction, self.tokenizer_path = (
            val_fraction,
            test_fraction,
            tokenizer,
        )
        # whether the file that was opened last has an index, which says the type
        self._is_described = False

    def prepare(self) -> None:
        """Check the files. Raises ConfigError."""
        self.check()

    def check(self) -> None:
        if self.tokenizer_path is not None:
            tokenizer.require_file(self.tokenizer_path)
        train = self.tokens("train")
        if len(train) <= self.context:
            raise ConfigError(
                f"data.context={self.context} is longer than the {len(train):,} tokens of "
                f"{self.path}. Type "
                f"data.context={max(len(train) - 1, 1)} or less, or name more tokens."
            )
        if not self._is_described:
            self._check_width(train[:_CHECKED_FIRST])
        for split in ("train", "val", "test"):
            if len(tokens := self.tokens(split)[:_CHECKED_FIRST]):
                self.check_range(int(tokens.min()), int(tokens.max()), split)

    def _check_width(self, tokens: Any) -> None:
        """Raise ConfigError if the tokens are halves or quarters of wider numbers: of small ones
        all but one are 0.
        """
        read = tokens.dtype.itemsize
        wider = next(
            (size for size in (8, 4) if size > read and _is_padded(tokens, size // read)), None
        )
        if wider is not None:
            raise ConfigError(
                f"data.source.dtype={self.dtype}: of each {wider // read} tokens of {self.path} "
                "all but one are 0, so "
                "they have more bytes. Type "
                f"data.source.dtype={'uint32' if wider == 4 else 'int64'}."
            )

    def check_range(self, least: int, largest: int, split: str) -> None:
        """Raise ConfigError if the smallest or the largest of some tokens is not in the
        vocabulary.
        """
        if least < 0 or largest >= self.vocab_size:
            raise ConfigError(
                f"data.source.vocab_size={self.vocab_size}, but {self.path} holds the token "
                f"{least if least < 0 else largest} ({split} split). Type the size of the "
                "vocabulary that made the "
                "tokens (GPT-2: 50257), or the right data.source.dtype."
            )

    def tokens(self, split: str) -> Any:
        """Return the token ids of a split, shape (tokens,), or an empty array if there is no such
        file.
        """
        if self.path.is_dir():
            file = self.path / f"{split}.bin"
            if split == "train" and not file.is_file():
                raise ConfigError(
                    f"data.path={self.path}: it holds no train.bin. Name a .bin file, or its "
                    "folder."
                )
            return self._open(file) if file.is_file() else np.empty(0, np.uint16)
        file = (
            self.path
            if self.path.suffix == ".bin"
            else self.path.with_name(f"{self.path.name}.bin")
        )
        if not file.is_file():
            if self.path.is_file():
                raise ConfigError(
                    f"data.path={self.path} is no .bin file. Write its token ids into one, without "
                    "a header, as "
                    "NumPy's ids.tofile('train.bin') does."
                )
            raise ConfigError(
                f"data.path={self.path}: there is no such folder or .bin file. Name one that is "
                "there."
            )
        every = self._open(file)
        val, test = (
            int(len(every) * fraction) for fraction in (self.val_fraction, self.test_fraction)
        )
        end = len(every) - val - test
        return {"train": every[:end], "val": every[end : end + val], "test": every[end + val :]}[
            split
        ]

    def _open(self, file: Path) -> Any:
        index = file.with_suffix(".idx")
        self._is_described = index.is_file()
        dtype, tokens = _described(index) if index.is_file() else (np.dtype(self.dtype), None)
        size = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(len(_NUMPY)) == _NUMPY:
                raise ConfigError(
                    f"data.path: {file} is a .npy file of NumPy's. Write its numbers alone: "
                    f"np.load('{file}').tofile(…)."
                )
        if size % dtype.itemsize or not size:
            raise ConfigError(
                f"data.path: {file} has {size} bytes: no whole number of {dtype} tokens. Write it "
                "again, or type its "
                "own data.source.dtype."
            )
        if tokens is not None and tokens * dtype.itemsize != size:
            raise ConfigError(
                f"data.path: {file} has {size // dtype.itemsize:,} tokens of type {dtype}, and "
                f"{index} describes "
                f"{tokens:,}. They are of different data, or one is cut short: write both again."
            )
        return np.memmap(file, dtype=dtype, mode="r")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the numbers of tokens and of the first and last of them."""
        train = self.tokens("train")
        ends = train[:4096].astype(np.int64).tobytes() + train[-4096:].astype(np.int64).tobytes()
        return hashlib.sha256(f"{len(train)}/{self.context}/".encode() + ends).hexdigest()[:16]

    @cached_property
    def tokenizer(self) -> Any:
        return None if self.tokenizer_path is None else tokenizer.load_external(self.tokenizer_path)


def _described(index: Path) -> tuple[np.dtype[Any], int]:
    """Return the type and the number of the tokens that a Megatron index describes.

    Raises ConfigError.
    """
    with index.open("rb") as stream:
        head = stream.read(len(MEGATRON) + _HEAD.size)
    if not head.startswith(MEGATRON) or len(head) < len(MEGATRON) + _HEAD.size:
        raise ConfigError(
            f"data.path: {index} is not an index of Megatron's, or is cut short. Write it again."
        )
    version, code, sequences = _HEAD.unpack(head[len(MEGATRON) :])
    if version != 1 or code not in _DTYPES:
        raise ConfigError(
            f"data.path: {index} has version {version} and type {code}, which are not known. Known "
            "are version 1 and "
            f"the types {', '.join(map(str, _DTYPES))}."
        )
    start = len(head) + 8  # after the number of documents
    if index.stat().st_size < start + 4 * sequences:
        raise ConfigError(
            f"data.path: {index} is cut short: it lists {sequences:,} sequences. Write it again."
        )
    lengths = (
        np.memmap(index, "<i4", mode="r", offset=start, shape=(sequences,))
        if sequences
        else np.empty(0, "<i4")
    )
    return np.dtype(_DTYPES[code]), int(lengths.sum(dtype=np.int64))


def _is_padded(tokens: Any, parts: int) -> bool:
    """Return whether all but the first of each so many tokens are 0, and some of the first are
    not.
    """
    whole = tokens[: len(tokens) // parts * parts].reshape(-1, parts)
    return len(whole) > 8 and not whole[:, 1:].any() and bool(whole[:, 0].any())


class TokenFileData(TokenData):
    """Windows of tokens that another tool has written."""

    source: TokenFiles

    @override
    def dataset(self, split: Split) -> Dataset[Any] | None:
        tokens = self.source.tokens(split)
        return CheckedWindows(self.source, split, context=self.context) if len(tokens) > 1 else None


class CheckedWindows(Windows):
    """Windows of a split. Each batch is checked, since nobody has read all of the files before."""

    def __init__(self, source: TokenFiles, split: Split, *, context: int) -> None:
        super().__init__(source.tokens(split), context=context, whole=split != "train")
        self.source, self.split = source, split

    @override
    def batch(self, indices: list[int]) -> Batch:
        batch = super().batch(indices)
        inputs, targets = batch["inputs"], batch["targets"]
        filled = self.tail is not None and max(indices) >= len(self.windows)  # with IGNORED
        tokens = targets[targets != IGNORED] if filled else targets
        first = inputs[:, 0]  # every other input is a target as well
        least, largest = min(first.min(), tokens.min()), max(first.max(), tokens.max())
        self.source.check_range(int(least), int(largest), self.split)
        return batch
