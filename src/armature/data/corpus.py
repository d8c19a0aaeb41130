"""Text of any size as token ids on disk: split and tokenized once, then memory-mapped.

Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.data import cache, sources
from armature.data import tokenizer as tokenizers
from armature.data.sources import Piece, SourceFile, Splitter
from armature.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
_NAMED = ("tokens", "bytes")  # of the counts, in the log
_VERSION = 1  # layout of the cache
_ENCODE_BYTES = 4 << 20  # text encoded in one call


@dataclass(eq=False)
class Corpus:
    """Files of text, split into train, val and test.

    Each split is one stream of tokens: [EOT doc EOT doc …].

    Whole files are held out, by a hash of their path relative to the corpus. With one file or a
    handful, that could give a split nothing, or several times its share; then records of JSONL or
    runs of lines are held out instead (see `sources.Splitter`). A byte-level BPE tokenizer is
    trained on the first `tokenizer_bytes` of the train split, with files in the order of their
    hashes. The corpus is never held in memory.

    Attributes:
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

    path: str | list[str] | None = None
    _: KW_ONLY
    field: str = "text"
    vocab_size: int = 4096
    context: int | None = None
    val_fraction: float = 0.05
    test_fraction: float = 0.05
    tokenizer: str | None = None
    tokenizer_bytes: int = 200_000_000
    cache_dir: str | None = None

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
        folder = self._place(files, None)
        if self.tokenizer is not None:
            own, given = folder / tokenizers.TOKENIZER_FILE, tokenizers.find(self.tokenizer)
            # one that was trained on these very files, as a run's, needs no second preparation
            if not own.is_file() or own.read_bytes() != given.read_bytes():
                folder = self._place(files, given)
        header = cache.open_or_build(folder, lambda part: self._build(part, files))
        targets = header["splits"]["train"]["tokens"] - 1
        if self.context is not None and targets < self.context:
            raise ConfigError(
                f"data.context={self.context} is longer than the corpus: its train split has "
                f"{targets + 1:,} tokens. Type data.context={max(targets // 16, 1)} or "
                "less, or name more text."
            )
        return folder, header

    def check(self) -> list[SourceFile]:
        """Return the files of the corpus.

        This is the fast part of `prepare`: it checks settings and finds files.

        Raises ConfigError for a path that names nothing or only empty files, or settings out of
        range.
        """
        if self.tokenizer is not None:
            size = tokenizers.load_external(self.tokenizer).get_vocab_size()
            if size > self.vocab_size:
                raise ConfigError(
                    f"data.source.vocab_size={self.vocab_size} is smaller than the {size:,} tokens "
                    f"of data.source.tokenizer={self.tokenizer}. Type data.source.vocab_size="
                    f"{size}, or the number of tokens of the model that you start from."
                )
        if self.val_fraction + self.test_fraction >= 0.9:
            raise ConfigError(
                f"data.source.val_fraction={self.val_fraction} and test_fraction="
                f"{self.test_fraction}: together they must be below 0.9."
            )
        files = sources.standard_library() if self.path is None else sources.find(self.path)
        if not any(file.size for file in files):
            raise ConfigError(
                f"data.path={self.path}: {_counted(files)}, all of them empty. Name "
                "files with text."
            )
        return files

    @property
    def folder(self) -> Path:
        """Folder of the cache."""
        return self._opened[0]

    @property
    def header(self) -> dict[str, Any]:
        """Description of the cache: how it was split, and tokens, bytes and documents of each
        split.
        """
        return self._opened[1]

    @property
    def fingerprint(self) -> str:
        """Hash that is the same for the same tokens and tokenizer, wherever and whenever they were
        prepared.
        """
        return cache.fingerprint(self.header)

    @cached_property
    def loaded_tokenizer(self) -> Tokenizer:
        return tokenizers.load(self.folder / tokenizers.TOKENIZER_FILE)

    def tokens(self, split: str) -> NDArray[np.unsignedinteger[Any]]:
        """Return the split's token ids, memory-mapped, shape (tokens,)."""
        return cache.Mapped(self.folder / f"{split}.bin", dtype=self._dtype, mode="r")

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def _place(self, files: list[SourceFile], tokenizer: Path | None) -> Path:
        """Return the folder of the cache, named by a hash of every file's name, size and time, and
        of every setting that the tokens depend on.
        """
        settings = [
            _VERSION,
            self.field,
            self.vocab_size,
            self.val_fraction,
            self.test_fraction,
            self.tokenizer_bytes if tokenizer is None else None,
        ]
        key = hashlib.sha256(json.dumps(settings).encode())
        if tokenizer is not None:
            key.update(tokenizer.read_bytes())
        key.update(sources.stamp(files))
        kind = "stdlib" if self.path is None else "text"
        return cache.root(self.cache_dir) / f"{kind}-{key.hexdigest()[:16]}"

    def _build(self, part: Path, files: list[SourceFile]) -> dict[str, Any]:
        started, total = time.monotonic(), sum(file.size for file in files)
        name = "the Python standard library" if self.path is None else self.path
        log.info("Preparing %s: %s, %.1f MB.", name, _counted(files), total / 1e6)
        split = Splitter.choose(
            files, val_fraction=self.val_fraction, test_fraction=self.test_fraction
        )
        with tokenizers.all_cores():
            if self.tokenizer is not None:
                bpe = tokenizers.load_external(self.tokenizer)
            else:
                bpe = tokenizers.train(self._train_text(files, split), vocab_size=self.vocab_size)
            tokenizers.write(bpe, part / tokenizers.TOKENIZER_FILE)
            counts = self._encode(part, files, split, bpe)
        if empty := [name for name, counted in counts.items() if not counted["bytes"]]:
            unit = "lines" if split.by == "piece" else "files"
            raise ConfigError(
                f"data.path={self.path}: {total:,} bytes of text are too little: no {unit} are "
                f"left for the {' and '.join(empty)} split. Name more text, or raise "
                "data.source.val_fraction and test_fraction."
            )
        for name, counted in counts.items():
            log.info("%s: %s tokens, %s bytes.", name, *(f"{counted[k]:,}" for k in _NAMED))
        log.info("Prepared in %.1f s.", time.monotonic() - started)
        return {
            "version": _VERSION,
            "split_by": split.by,
            "tokenizer_vocab_size": bpe.get_vocab_size(),
            "splits": counts,
        }

    def _train_text(self, files: list[SourceFile], split: Splitter) -> Iterator[str]:
        """Yield the first `tokenizer_bytes` of the train split's text."""
        left = self.tokenizer_bytes
        in_order = sorted(files, key=lambda file: sources.hash_place(file.name))
        for piece in self._pieces(in_order, split):
            if left <= 0:
                return
            if split(piece.file, piece.number) == "train":
                yield piece.text
                left -= piece.size

    def _encode(
        self, part: Path, files: list[SourceFile], split: Splitter, bpe: Tokenizer
    ) -> dict[str, Any]:
        """Write the tokens of each split; return how many tokens, bytes and documents it has."""
        end = np.array([tokenizers.document_token(bpe)], self._dtype).tobytes()
        counts = {name: dict.fromkeys((*_NAMED, "documents"), 0) for name in SPLITS}
        last: dict[str, tuple[SourceFile, int]] = {}  # piece of each split
        with ExitStack() as opened:
            written = {
                name: opened.enter_context((part / f"{name}.bin").open("wb")) for name in SPLITS
            }
            for pieces in _batches(self._pieces(files, split)):
                encoded = bpe.encode_batch_fast(
                    [piece.text for piece in pieces], add_special_tokens=False
                )
                for piece, encoding in zip(pieces, encoded, strict=True):
                    name = split(piece.file, piece.number)
                    if piece.starts or last.get(name) != (piece.file, piece.number - 1):
                        written[name].write(end)
                        counts[name]["documents"] += 1
                        counts[name]["tokens"] += 1
                    written[name].write(np.array(encoding.ids, self._dtype).tobytes())
                    counts[name]["tokens"] += len(encoding.ids)
                    counts[name]["bytes"] += piece.size
                    last[name] = piece.file, piece.number
        return counts

    def _pieces(self, files: list[SourceFile], split: Splitter) -> Iterator[Piece]:
        """Yield the pieces that have text."""
        for file in files:
            for piece in sources.pieces(file, field=self.field, piece_bytes=split.piece_bytes):
                if piece.size:
                    yield piece


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in lists of about _ENCODE_BYTES."""
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += piece.size
        if size >= _ENCODE_BYTES:
            yield waiting
            waiting, size = [], 0
    yield waiting


def _counted(files: list[SourceFile]) -> str:
    return f"{len(files):,} file{'s' * (len(files) != 1)}"
