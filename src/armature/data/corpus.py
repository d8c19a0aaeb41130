"""Text of any size as token ids on disk: split and tokenized once, then memory-mapped.

Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from armature.data import cache, sources, tokenizer
from armature.data.sources import Piece, SourceFile, Splitter
from armature.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
_VERSION = 1  # layout of the cache
_ENCODE_BYTES = 4 << 20  # text encoded in one call


class Corpus:
    """Files of text, split into train, val and test.

    Each split is one stream of tokens: [EOT doc EOT doc …].

    Whole files are held out, by a hash of their path relative to the corpus. With one file or a
    handful, that could give a split nothing, or several times its share; then records of JSONL or
    runs of lines are held out instead (see `sources.Splitter`). A byte-level BPE tokenizer is
    trained on the first `tokenizer_bytes` of the train split, with files in the order of their
    hashes. The corpus is never held in memory.

    Args:
        path: files, folders or patterns of UTF-8 text, plain, .gz, .jsonl or .jsonl.gz. None: the
            Python standard library's own source.
        field: the field of a JSONL record that holds its text.
        vocab_size: tokens, including END_OF_TEXT.
        context: tokens per training sample; a train split shorter than that is an error.
        val_fraction: approximate share of the bytes that is held out for validation.
        test_fraction: approximate share of the bytes that is held out for the test.
        tokenizer: a tokenizer.json to use instead of training one, as fine-tuning needs; it decides
            the token that begins each document.
        tokenizer_bytes: how much text the tokenizer is trained on.
        cache_dir: folder of prepared corpora; None: the environment's ARMATURE_CACHE, else
            ~/.cache/armature.
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        *,
        field: str = "text",
        vocab_size: int = 4096,
        context: int | None = None,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        tokenizer: str | None = None,
        tokenizer_bytes: int = 200_000_000,
        cache_dir: str | None = None,
    ) -> None:
        self.path = path
        self.field, self.vocab_size, self.context = field, vocab_size, context
        self.val_fraction, self.test_fraction, self.tokenizer_bytes = (
            val_fraction,
            test_fraction,
            tokenizer_bytes,
        )
        self.tokenizer_path, self.cache_dir = tokenizer, cache_dir

    def prepare(self) -> None:
        """Open the cache, and build it first if it is absent or damaged.

        Several processes may call this at once.

        Raises ConfigError for a path that names nothing, files that are not text, an impossible
        vocabulary or split, or a context longer than the train split.
        """
        _ = self._opened

    @cached_property
    def _opened(self) -> tuple[Path, dict[str, Any]]:
        files = self.check()
        folder = (
            cache.root(self.cache_dir)
            / f"{'stdlib' if self.path is None else 'text'}-{self._key(files)}"
        )
        header = cache.open_or_build(folder, lambda part: self._build(part, files))
        targets = header["splits"]["train"]["tokens"] - 1
        if self.context is not None and targets < self.context:
            raise ConfigError(
                f"data.context={self.context} is longer than the corpus: its train split has "
                f"{targets + 1:,} tokens. "
                f"Type data.context={max(targets // 16, 1)} or less, or name more text."
            )
        return folder, header

    def check(self) -> list[SourceFile]:
        """Return the files of the corpus.

        This is the fast part of `prepare`: it checks settings and finds files.

        Raises ConfigError for a path that names nothing or only empty files, or settings out of
        range.
        """
        problems = []
        if self.tokenizer_path is not None:
            size = tokenizer.load_external(self.tokenizer_path).get_vocab_size()
            if size > self.vocab_size:
                problems.append(
                    f"data.source.vocab_size={self.vocab_size} is smaller than the {size:,} tokens "
                    "of "
                    f"data.source.tokenizer={self.tokenizer_path}. Type "
                    f"data.source.vocab_size={size}, or the "
                    "number of tokens of the model that you start from."
                )
        fractions = (self.val_fraction, self.test_fraction)
        if min(fractions) <= 0 or sum(fractions) >= 0.9:
            problems.append(
                f"data.source.val_fraction={self.val_fraction} and "
                f"test_fraction={self.test_fraction}: each must be "
                "above 0, and together below 0.9."
            )
        if problems:
            raise ConfigError(problems)
        files = sources.standard_library() if self.path is None else sources.find(self.path)
        if not any(file.size for file in files):
            raise ConfigError(
                f"data.path={self.path}: {_count(len(files), 'file')}, all of them empty. Name "
                "files with text."
            )
        return files

    @property
    def folder(self) -> Path:
        """Folder of the cache."""
        return self._opened[0]

    @property
    def header(self) -> dict[str, Any]:
        """Description of the cache: vocabulary, dtype, source, and tokens, bytes and documents of
        each split.
        """
        return self._opened[1]

    @property
    def fingerprint(self) -> str:
        """Hash that is the same for the same tokens and tokenizer, wherever and whenever they were
        prepared.
        """
        return cache.fingerprint(self.header)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer.load(self.folder / tokenizer.TOKENIZER_FILE)

    def tokens(self, split: str) -> NDArray[np.unsignedinteger[Any]]:
        """Return the split's token ids, memory-mapped, shape (tokens,)."""
        return np.memmap(self.folder / f"{split}.bin", dtype=self.header["dtype"], mode="r")

    def _key(self, files: list[SourceFile]) -> str:
        """Return a hash of every file's name, size and time, and of every setting that the tokens
        depend on.
        """
        seen = self.tokenizer_bytes if self.tokenizer_path is None else None
        settings = [
            _VERSION,
            self.field,
            self.vocab_size,
            self.val_fraction,
            self.test_fraction,
            seen,
        ]
        key = hashlib.sha256(json.dumps(settings).encode())
        if self.tokenizer_path is not None:
            key.update(Path(self.tokenizer_path).read_bytes())
        key.update(sources.stamp(files))
        return key.hexdigest()[:16]

    def _build(self, part: Path, files: list[SourceFile]) -> dict[str, Any]:
        started = time.monotonic()
        total = sum(file.size for file in files)
        source = (
            f"Python {platform.python_version()} standard library"
            if self.path is None
            else str(self.path)
        )
        log.info("Preparing %s: %s, %.1f MB.", source, _count(len(files), "file"), total / 1e6)
        split = Splitter.choose(
            files, val_fraction=self.val_fraction, test_fraction=self.test_fraction
        )
        with tokenizer.all_cores():
            if self.tokenizer_path is not None:
                bpe = tokenizer.load_external(self.tokenizer_path)
            else:
                bpe = tokenizer.train(self._train_text(files, split), vocab_size=self.vocab_size)
            tokenizer.write(bpe, part / tokenizer.TOKENIZER_FILE)
            statistics = self._encode(part, files, split, bpe)
        empty = [name for name, counts in statistics.items() if not counts["bytes"]]
        if empty:
            unit = "lines" if split.by == "piece" else "files"
            raise ConfigError(
                f"data.path={self.path}: {total:,} bytes of text are too little: no {unit} are "
                "left for the "
                f"{' and '.join(empty)} split. Name more text, or raise data.source.val_fraction "
                "and test_fraction."
            )
        seconds = time.monotonic() - started
        for name, counts in statistics.items():
            log.info(
                "%s: %s tokens, %s bytes.", name, f"{counts['tokens']:,}", f"{counts['bytes']:,}"
            )
        log.info("Prepared in %.1f s.", seconds)
        return {
            "version": _VERSION,
            "source": source,
            "source_files": len(files),
            "split_by": split.by,
            "vocab_size": self.vocab_size,
            "tokenizer_vocab_size": bpe.get_vocab_size(),
            "dtype": self._dtype().str,
            "splits": statistics,
            "prepared_in_seconds": round(seconds, 2),
        }

    def _train_text(self, files: list[SourceFile], split: Splitter) -> Iterator[str]:
        """Yield the first `tokenizer_bytes` of the train split's text."""
        left = self.tokenizer_bytes
        for file, piece in self._pieces(
            sorted(files, key=lambda file: sources.hash_place(file.name)), split
        ):
            if split(file, piece.number) != "train":
                continue
            yield piece.text
            left -= piece.size
            if left <= 0:
                return

    def _encode(
        self, part: Path, files: list[SourceFile], split: Splitter, bpe: Tokenizer
    ) -> dict[str, Any]:
        writers = {name: _Writer(part / f"{name}.bin", self._dtype(), bpe) for name in SPLITS}
        waiting: list[tuple[SourceFile, Piece]] = []
        size = 0
        for file, piece in self._pieces(files, split):
            waiting.append((file, piece))
            size += piece.size
            if size >= _ENCODE_BYTES:
                _write(writers, split, bpe, waiting)
                waiting, size = [], 0
        _write(writers, split, bpe, waiting)
        return {name: writer.close() for name, writer in writers.items()}

    def _pieces(
        self, files: list[SourceFile], split: Splitter
    ) -> Iterator[tuple[SourceFile, Piece]]:
        for file in files:
            for piece in sources.pieces(file, field=self.field, piece_bytes=split.piece_bytes):
                yield file, piece

    def _dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")


@dataclass
class _Writer:
    """Appends the documents of one split to its file, and counts them."""

    path: Path
    dtype: np.dtype[Any]
    bpe: Tokenizer
    tokens: int = 0
    bytes: int = 0
    documents: int = 0
    _last: tuple[SourceFile, int] | None = None
    _file: BinaryIO = field(init=False)

    def __post_init__(self) -> None:
        self._file = self.path.open("wb")
        self._end = np.array([tokenizer.document_token(self.bpe)], self.dtype).tobytes()

    def add(self, file: SourceFile, piece: Piece, ids: list[int]) -> None:
        if not piece.size:
            return
        continues = not piece.starts and self._last == (file, piece.number - 1)
        if not continues:
            self._file.write(self._end)
            self.tokens += 1
            self.documents += 1
        self._file.write(np.array(ids, self.dtype).tobytes())
        self.tokens += len(ids)
        self.bytes += piece.size
        self._last = file, piece.number

    def close(self) -> dict[str, Any]:
        self._file.close()
        return {"tokens": self.tokens, "bytes": self.bytes, "documents": self.documents}


def _write(
    writers: dict[str, _Writer],
    split: Splitter,
    bpe: Tokenizer,
    pieces: list[tuple[SourceFile, Piece]],
) -> None:
    encodings = bpe.encode_batch_fast([piece.text for _, piece in pieces], add_special_tokens=False)
    for (file, piece), encoding in zip(pieces, encodings, strict=True):
        writers[split(file, piece.number)].add(file, piece, encoding.ids)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
