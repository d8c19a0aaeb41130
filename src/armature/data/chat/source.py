"""Chats of any size as token ids on disk: rendered, masked and packed once, then memory-mapped.

Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from armature.data import cache, sources
from armature.data import tokenizer as tokens
from armature.data.chat import conversations
from armature.data.chat.conversations import Conversation
from armature.data.chat.packing import best_fit
from armature.data.chat.template import BUILT_IN, ChatTemplate, NotRenderable, load, load_tokenizer
from armature.data.sources import SourceFile
from armature.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
_VERSION = 4  # layout of the cache, and what a template is given of a message
_TOGETHER = 1024  # conversations that are encoded in one call
LEFT_OUT = "too long, without an answer within the context, or pairs of equal answers"


class Conversations:
    """Conversations in JSON lines as rows of tokens, of which those that the assistant wrote are
    learned.

    The tokenizer's chat template writes each conversation. Conversations are held out by a hash of
    their content, so equal ones are in one split, and stay there when others come or go.

    Args:
        path: files, folders or patterns of .jsonl or .jsonl.gz (`conversations.parse` says in which
            form).
        tokenizer: a folder with a tokenizer.json and its chat template: a model's from Hugging
            Face, or a run's.
        template: "chatml" or "plain", or the path of a Jinja2 file; None: the one in the
            tokenizer's folder.
        template_arguments: values of variables that the template asks for, such as
            {"enable_thinking": False}.
        context: tokens per row.
        vocab_size: tokens of the model.
        packing: a row holds as many whole conversations as fit; attention stays within each. False:
            one per row.
        too_long: what is done with a conversation of more than `context` tokens: "cut" its end off,
            or "drop" it.
        val_fraction, test_fraction: approximate shares of the conversations that are held out.
        cache_dir: folder of prepared data; None: the environment's ARMATURE_CACHE, else
            ~/.cache/armature.
    """

    kind: ClassVar[str] = "chat"  # begins the name of the cache's folder
    unit = "rows"
    # makes of a line so many conversations, which are kept or left out together
    parse: Callable[..., tuple[Conversation, ...]] = staticmethod(conversations.parse)
    sides = 1

    def __init__(
        self,
        path: str | list[str],
        *,
        tokenizer: str | None,
        context: int,
        vocab_size: int | None = None,
        template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        packing: bool = True,
        too_long: Literal["cut", "drop"] = "cut",
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        cache_dir: str | None = None,
    ) -> None:
        self.path = path
        self.tokenizer_path, self.template_path, self.template_arguments = (
            tokenizer,
            template,
            template_arguments,
        )
        self.context, self.vocab_size, self.packing, self.too_long = (
            context,
            vocab_size,
            packing,
            too_long,
        )
        self.val_fraction, self.test_fraction, self.cache_dir = (
            val_fraction,
            test_fraction,
            cache_dir,
        )

    def check(self) -> list[SourceFile]:
        """Return the files: the part of `prepare` that takes no time. Raises ConfigError."""
        if self.val_fraction + self.test_fraction > 0.9:
            raise ConfigError(
                f"data.source.val_fraction={self.val_fraction} and test_fraction="
                f"{self.test_fraction}: together they must be at most 0.9."
            )
        _ = self.template
        if self.template_path in BUILT_IN and (problem := self._end_problem()):
            raise ConfigError(problem)
        files = sources.find(self.path)
        if wrong := [
            file for file in files if not file.name.removesuffix(".gz").endswith(".jsonl")
        ]:
            raise ConfigError(
                f"data.path={self.path}: {wrong[0].path} is no .jsonl file. Name files of JSON "
                "lines."
            )
        return files

    def prepare(self) -> None:
        """Open the cache, and build it first if it is absent or damaged, and say what is in it.

        Several processes may call this at once. Raises ConfigError for files that are no
        conversations, or of which nothing is left to learn.
        """
        self._report(self.header)

    @cached_property
    def template(self) -> ChatTemplate:
        return load(
            self.tokenizer_file.parent,
            template=self.template_path,
            arguments=self.template_arguments,
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_file)

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer.json. Raises ConfigError."""
        if self.tokenizer_path is None:
            raise ConfigError(
                "data.source.tokenizer=null: name the folder of the model that you start from, "
                "which has a "
                f"{tokens.TOKENIZER_FILE} and a chat template, or a run directory."
            )
        path = Path(self.tokenizer_path).expanduser()
        file = path / tokens.TOKENIZER_FILE if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"data.source.tokenizer={self.tokenizer_path}: there is no "
                f"{tokens.TOKENIZER_FILE}. "
                "Name a folder that holds one: a model's, or a run's."
            )
        return file

    @property
    def header(self) -> dict[str, Any]:
        """Description of the cache: per split, its conversations, rows and tokens, and how many
        were cut or dropped.
        """
        return self._opened[1]

    @property
    def fingerprint(self) -> str:
        """Hash that is the same for the same rows, wherever and whenever they were prepared."""
        return cache.fingerprint(self.header)

    def arrays(self, split: str) -> dict[str, NDArray[Any]]:
        """Return the arrays of a split, memory-mapped.

        `ids` and `learned` hold all conversations one after the other; `starts` where each begins,
        and the end; `members` the conversations of all rows; `rows` where in it each row begins,
        and the end.
        """
        folder = self._opened[0]
        flat = {"ids": self.header["dtype"], "learned": "?"}
        found: dict[str, NDArray[Any]] = {
            name: np.fromfile(file, kind)
            if not file.stat().st_size
            else np.memmap(file, kind, mode="r")
            for name, kind in flat.items()
            for file in [folder / f"{split}.{name}"]
        }
        return found | {
            name: np.load(folder / f"{split}.{name}.npy") for name in ("starts", "members", "rows")
        }

    @cached_property
    def _opened(self) -> tuple[Path, dict[str, Any]]:
        files = self.check()
        folder = cache.root(self.cache_dir) / f"{self.kind}-{self._key(files)}"
        header = cache.open_or_build(folder, lambda part: self._build(part, files))
        if self.vocab_size is not None and header["largest_id"] >= self.vocab_size:
            size = self.tokenizer.get_vocab_size()
            raise ConfigError(
                f"data.source.tokenizer={self.tokenizer_path} has {size:,} tokens, and the model "
                "only "
                f"data.source.vocab_size={self.vocab_size}. Name the tokenizer of the model, or "
                "leave "
                "data.source.vocab_size out; for a model that begins at random type "
                f"data.source.vocab_size={size}."
            )
        return folder, header

    def _report(self, header: dict[str, Any]) -> None:
        for split, counts in header["splits"].items():
            if counts["read"]:
                log.info("%s: %s", split, self._described(counts))
        if self.template.end_of_turn is None:
            log.warning(
                "The chat template marks no end of the assistant's messages, or none could be "
                "found: the model may not "
                "learn to stop. Name another with data.source.template."
            )
        elif problem := self._end_problem():
            log.warning(problem)

    def _end_problem(self) -> str | None:
        """Return a problem if the end of a turn is no token: what serves the model could not stop
        at it.
        """
        end = self.template.end_of_turn
        if end is None or len(self.tokenizer.encode(end, add_special_tokens=False).ids) == 1:
            return None
        named = (
            "the chat template"
            if self.template_path is None
            else f"data.source.template={self.template_path}"
        )
        plain = (
            "Type data.source.template=plain, which ends them with the tokenizer's own last token."
        )
        return (
            f"{named} ends the assistant's messages with {end}, which is no token of "
            f"{self.tokenizer_file}: no program "
            "would know where an answer ends. "
            f"{plain if self.template_path != 'plain' else 'Name another tokenizer.'}"
        )

    def _key(self, files: list[SourceFile]) -> str:
        settings = [
            _VERSION,
            self.template.source,
            dict(self.template.special),
            self.context,
            self.packing,
            self.too_long,
            self.val_fraction,
            self.test_fraction,
        ]
        key = hashlib.sha256(json.dumps(settings).encode())
        key.update(self.tokenizer_file.read_bytes())
        key.update(sources.stamp(files))
        return key.hexdigest()[:16]

    def _build(self, part: Path, files: list[SourceFile]) -> dict[str, Any]:
        log.info("Preparing the conversations of %s.", self.path)
        dtype = np.dtype("<u2" if self.tokenizer.get_vocab_size() <= 1 << 16 else "<u4")
        with ExitStack() as opened:
            writers = {split: Writer(part / split, dtype, opened) for split in SPLITS}
            self._write(files, writers)
        statistics = {
            split: writer.pack(self._rows_of(writer.lengths)) for split, writer in writers.items()
        }
        if not statistics["train"]["conversations"]:
            raise ConfigError(
                f"data.path={self.path}: of {statistics['train']['read']:,} lines none is left for "
                f"training, since they are {LEFT_OUT}. Type a longer data.context than "
                f"{self.context} (data.source.too_long={self.too_long}), a lower "
                f"data.source.val_fraction, or name other files."
            )
        largest = max(writer.largest for writer in writers.values())
        return {
            "version": _VERSION,
            "dtype": dtype.str,
            "splits": statistics,
            "largest_id": largest,
        }

    def _write(self, files: list[SourceFile], writers: dict[str, Writer]) -> None:
        read = (each for line in conversations.read(files, self.parse) for each in line)
        encoded = self._encoded(read)
        for sides in zip(*[encoded] * self.sides, strict=True):  # of one iterator: those of a line
            place = sides[0].conversation.place
            writer = writers[sources.split_of(place, self.val_fraction, self.test_fraction)]
            writer.counts["read"] += 1
            # of n tokens, n - 1 are inputs, which predict the tokens after them
            cut = any(len(side.ids) - 1 > self.context for side in sides)
            kept = [side.up_to(self.context + 1) for side in sides]
            first, last = kept[0], kept[-1]
            same = first.ids == last.ids and np.array_equal(first.learned, last.learned)
            if (
                (cut and self.too_long == "drop")
                or (same and self.sides > 1)
                or not all(side.has_targets for side in kept)
            ):
                writer.counts["dropped"] += 1
                continue
            writer.counts["cut"] += cut
            for side in kept:
                writer.add(side)

    def _rows_of(self, lengths: list[int]) -> list[list[int]]:
        """Return the conversations of each row, given their numbers of inputs."""
        return (
            best_fit(lengths, room=self.context)
            if self.packing
            else [[i] for i in range(len(lengths))]
        )

    def _encoded(self, read: Iterable[Conversation]) -> Iterator[Encoded]:
        with tokens.all_cores():
            read = iter(read)
            while some := list(islice(read, _TOGETHER)):
                yield from encode(some, self.template, self.tokenizer)

    def _described(self, counts: dict[str, Any]) -> str:
        places = max(counts["rows"] * self.sides * self.context, 1)
        words = {"cut": "cut to the context", "dropped": f"left out: {LEFT_OUT}"}
        return (
            f"{counts['conversations']:,} conversations in {counts['rows']:,} {self.unit} of "
            f"{self.context:,} tokens, {counts['tokens'] / places:.0%} filled; "
            f"{counts['targets'] / max(counts['tokens'], 1):.0%} of the tokens are the assistant's."
            + "".join(f" {counts[key]:,} {each}." for key, each in words.items() if counts[key])
        )


@dataclass(frozen=True)
class Encoded:
    """A conversation's token ids, and which of them the model is to write."""

    conversation: Conversation
    ids: list[int]
    learned: NDArray[np.bool_]

    def up_to(self, tokens: int) -> Encoded:
        """Return the beginning, of at most so many tokens."""
        return Encoded(self.conversation, self.ids[:tokens], self.learned[:tokens])

    @property
    def has_targets(self) -> bool:
        return bool(self.learned[1:].any())


def encode(
    some: Sequence[Conversation], template: ChatTemplate, tokenizer: Tokenizer
) -> Iterator[Encoded]:
    """Yield conversations as tokens.

    A token counts as the assistant's if it has one of its characters.

    Raises ConfigError with the line of a conversation that the template cannot write.
    """
    rendered = []
    for each in some:
        try:
            rendered.append(template.assistant_spans(each.messages, tools=each.tools))
            rendered[-1][0].encode()
        except (NotRenderable, UnicodeEncodeError) as error:
            remedy = getattr(error, "remedy", NotRenderable.remedy)
            raise ConfigError(f"{each.where}: {error}. {remedy}.") from error
    encodings = tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
    for conversation, (_, spans), encoding in zip(some, rendered, encodings, strict=True):
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learned = np.zeros(len(offsets), np.bool_)
        for i in conversation.learned:
            start, end = spans[i]
            # trimmed spaces have no length
            learned |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        yield Encoded(conversation, encoding.ids, learned)


@dataclass
class Writer:
    """Appends the conversations of one split to its files, and counts them."""

    stem: Path
    dtype: np.dtype[Any]
    opened: ExitStack
    largest: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _starts: list[int] = field(default_factory=lambda: [0])
    _files: dict[str, BinaryIO] = field(init=False)

    def __post_init__(self) -> None:
        paths = {name: self.stem.with_suffix(f".{name}") for name in ("ids", "learned")}
        self._files = {
            name: self.opened.enter_context(path.open("wb")) for name, path in paths.items()
        }

    def add(self, encoded: Encoded) -> None:
        self.counts["tokens"] += len(encoded.ids) - 1
        self.counts["targets"] += int(encoded.learned[1:].sum())
        self.largest = max(self.largest, *encoded.ids)
        self._files["ids"].write(np.array(encoded.ids, self.dtype).tobytes())
        self._files["learned"].write(encoded.learned.tobytes())
        self._starts.append(self._starts[-1] + len(encoded.ids))

    @property
    def lengths(self) -> list[int]:
        """The number of inputs of each conversation."""
        return (np.diff(np.array(self._starts, np.int64)) - 1).tolist()

    def pack(self, rows: list[list[int]]) -> dict[str, Any]:
        """Write the conversations' places and rows, and return what was counted."""
        members = np.array([i for row in rows for i in row], np.int64)
        ends = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        for name, array in {
            "starts": np.array(self._starts, np.int64),
            "members": members,
            "rows": ends,
        }.items():
            np.save(self.stem.with_suffix(f".{name}.npy"), array)
        counts = {
            name: self.counts[name] for name in ("read", "cut", "dropped", "tokens", "targets")
        }
        return {"conversations": len(self._starts) - 1, "rows": len(rows), **counts}
