"""Text that is read and tokenized during training: a Stream over files, for a corpus too large to
prepare first.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from armature.data import cache, sources, tokenizer
from armature.data.base import Batch, Split
from armature.data.sampler import permuted
from armature.data.sources import SourceFile
from armature.data.stream import Stream
from armature.data.text import TokenData
from armature.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

_VERSION = 1  # layout of the index
Window = NDArray[np.uint16]  # (context + 1,) token ids


@dataclass(frozen=True)
class Part:
    """Windows [first, first + count) of a file."""

    file: SourceFile
    first: int
    count: int


class Shards:
    """Files of text as windows of `context` byte tokens.

    An index, made once, holds the number of windows per file.

    A window may cross the ends of documents, but not the end of a file. The first windows of the
    first files are held out.

    Args:
        path: files, folders or patterns of UTF-8 text, plain, .gz, .jsonl or .jsonl.gz.
        field: the field of a JSONL record that holds its text.
        context: tokens per sample.
        vocab_size: tokens of the model; at least the 256 bytes and the end of a text.
        held_out: windows for val, and as many for test.
        block: consecutive windows that are shuffled among each other; files also come in another
            order each epoch.
        cache_dir: folder of the index; None: the environment's ARMATURE_CACHE, else
            ~/.cache/armature.
    """

    def __init__(
        self, path: str | Sequence[str], *, context: int, field: str = "text",
        vocab_size: int = tokenizer.SMALLEST_VOCABULARY, held_out: int = 64, block: int = 1024,
        cache_dir: str | None = None,
    ) -> None:  # fmt: skip
        self.path = path if isinstance(path, str) else list(path)
        self.context, self.field, self.vocab_size = context, field, vocab_size
        self.held_out, self.block, self.cache_dir = held_out, block, cache_dir

    def check(self) -> list[SourceFile]:
        """Check the settings and find the files: the part of `prepare` that takes no time.

        Raises ConfigError.
        """
        least = {
            "context": 1,
            "held_out": 1,
            "block": 1,
            "vocab_size": tokenizer.SMALLEST_VOCABULARY,
        }
        problems = [
            f"data.source.{name}={getattr(self, name)}: at least {smallest} is needed."
            for name, smallest in least.items()
            if getattr(self, name) < smallest
        ]
        if problems:
            raise ConfigError(problems)
        return sources.find(self.path)

    def prepare(self) -> None:
        """Count the windows of each file, once. Several processes may call this at once."""
        _ = self.index

    @cached_property
    def index(self) -> list[Part]:
        """All windows of each file.

        Raises ConfigError for files that are not text, or too little text.
        """
        files = self.check()
        key = hashlib.sha256(json.dumps([_VERSION, self.field, self.context]).encode())
        key.update(sources.stamp(files))
        folder = cache.root(self.cache_dir) / f"index-{key.hexdigest()[:16]}"
        counts = cache.open_or_build(folder, lambda part: self._count(files))["windows"]
        if sum(counts) <= 2 * self.held_out:
            raise ConfigError(
                f"data.path={self.path} has {sum(counts)} windows of {self.context} bytes, of "
                "which "
                f"data.source.held_out={self.held_out} are for val and as many for test. Name more "
                "text, or lower "
                "held_out or context."
            )
        return [Part(file, 0, count) for file, count in zip(files, counts, strict=True)]

    @property
    def fingerprint(self) -> str:
        """Hash that is the same for the same windows in the same files, wherever they lie."""
        content = [
            self.field,
            self.context,
            self.held_out,
            [(part.file.name, part.count) for part in self.index],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of bytes: it has no merges, so it needs no text to be trained on."""
        return tokenizer.train([], vocab_size=tokenizer.SMALLEST_VOCABULARY)

    def parts(self, split: Split) -> list[Part]:
        """Return the parts of a split, in the order of the files."""
        total = sum(part.count for part in self.index)
        bounds = {"val": (0, self.held_out), "test": (self.held_out, 2 * self.held_out)}
        start, end = bounds.get(split, (2 * self.held_out, total))
        found, place = [], 0
        for part in self.index:
            first, last = max(start - place, 0), min(end - place, part.count)
            if first < last:
                found.append(Part(part.file, first, last - first))
            place += part.count
        return found

    def windows(self, part: Part, start: int) -> Iterator[Window]:
        """Yield the windows of a part from its `start`-th. The file is read from its beginning."""
        skipped = (part.first + start) * self.context
        held = np.empty(0, np.uint16)
        left = part.count - start
        for tokens in self._tokens(part.file):
            held = np.concatenate([held, tokens])
            drop = min(skipped, len(held))
            held, skipped = held[drop:], skipped - drop
            while left and len(held) > self.context:
                yield held[: self.context + 1]
                held, left = held[self.context :], left - 1
            if not left:
                return

    def _tokens(self, file: SourceFile) -> Iterator[Window]:
        end = np.zeros(1, np.uint16)  # END_OF_TEXT
        for piece in sources.pieces(file, field=self.field):
            tokens = self._ids[np.frombuffer(piece.text.encode(), np.uint8)]
            yield np.concatenate([end, tokens]) if piece.starts else tokens

    @cached_property
    def _ids(self) -> NDArray[np.uint16]:
        """Token of each byte. Bytes that never occur in UTF-8 have none."""
        ids = np.zeros(256, np.uint16)
        for code in [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]:
            character = chr(code)
            ids[list(character.encode())] = self.tokenizer.encode(character).ids
        return ids

    def _count(self, files: list[SourceFile]) -> dict[str, Any]:
        log.info("Counting the samples of %d files in %s.", len(files), self.path)
        sources.check_heads(files)
        sizes = [
            sum(p.size + p.starts for p in sources.pieces(file, field=self.field)) for file in files
        ]
        return {"windows": [max(size - 1, 0) // self.context for size in sizes]}


class StreamedWindows(Stream):
    """The windows of one split. In training, files come in another order each epoch."""

    def __init__(self, shards: Shards, split: Split, *, seed: int) -> None:
        self.shards, self.parts, self.block = shards, shards.parts(split), shards.block
        self.seed = seed if split == "train" else None

    @override
    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    @override
    def records(self, epoch: int, start: int) -> Iterator[Window]:
        order = np.arange(len(self.parts))
        if self.seed is not None:
            order = permuted(order, size=len(order), seed=f"{self.seed}/files", epoch=epoch)
        for number in order.tolist():
            part = self.parts[number]
            if start < part.count:
                yield from self.shards.windows(part, start)
            start = max(start - part.count, 0)

    @override
    def sample(self, record: Window) -> Batch:
        tokens = torch.from_numpy(record.astype(np.int64))
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


class StreamedTextData(TokenData):
    """Bytes of text, read from files in their order."""

    source: Shards

    @override
    def dataset(self, split: Split) -> Stream:
        return StreamedWindows(self.source, split, seed=self.seed)
