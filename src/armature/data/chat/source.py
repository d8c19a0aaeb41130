"""Chats of any size as token ids on disk: rendered, masked and packed once, then memory-mapped.

Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

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
_VERSION = 7  # layout of the cache, and what a template is given of a message
_TOGETHER = 1024  # lines that are encoded in one call
LEFT_OUT = "too long, without an answer within the context, or pairs of equal answers"


@dataclass(eq=False)
class Conversations:
    """Conversations in JSON lines as rows of tokens, of which those that the assistant wrote are
    learned.

    The tokenizer's chat template writes each conversation. Conversations are held out by a hash of
    their content, so equal ones are in one split, and stay there when others come or go.

    Attributes:
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

    path: str | list[str]
    _: KW_ONLY
    tokenizer: str | None
    context: int
    vocab_size: int | None = None
    template: str | None = None
    template_arguments: Mapping[str, Any] | None = None
    packing: bool = True
    too_long: Literal["cut", "drop"] = "cut"
    val_fraction: float = 0.05
    test_fraction: float = 0.0
    cache_dir: str | None = None
    kind: ClassVar[str] = "chat"  # begins the name of the cache's folder
    unit: ClassVar[str] = "rows"
    # makes of a line so many conversations, which are kept or left out together
    parse: ClassVar[Callable[..., tuple[Conversation, ...]]] = staticmethod(conversations.parse)

    def check(self) -> list[SourceFile]:
        """Return the files: the part of `prepare` that takes no time. Raises ConfigError."""
        stops = self.chat_template.end_of_turn is not None
        if stops and self.template in BUILT_IN and (problem := self._end_problem()):
            raise ConfigError(problem)
        files = sources.find(self.path)
        for file in files:
            if not file.name.removesuffix(".gz").endswith(".jsonl"):
                raise ConfigError(
                    f"data.path={self.path}: {file.path} is no .jsonl file. Name files of JSON "
                    "lines."
                )
        return files

    def prepare(self) -> None:
        """Open the cache, and build it first if it is absent or damaged, and say what is in it.

        Several processes may call this at once. Raises ConfigError for files that are no
        conversations, or of which nothing is left to learn.
        """
        for split, counts in self.header["splits"].items():
            if counts["read"]:
                log.info("%s: %s", split, self._described(counts))
        if problem := self._end_problem():
            log.warning(problem)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return load(
            self.tokenizer_file.parent, template=self.template, arguments=self.template_arguments
        )

    @cached_property
    def loaded_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_file)

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer.json. Raises ConfigError."""
        if self.tokenizer is None:
            raise ConfigError(
                "data.source.tokenizer=null: name the folder of the model that you start from, "
                f"which has a {tokens.TOKENIZER_FILE} and a chat template, or a run directory."
            )
        return tokens.find(self.tokenizer)

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
        """Return the arrays of a split that has rows.

        `tokens`, memory-mapped, holds all conversations one after the other: of `t` that is not
        learned `~t`, which is negative. `starts` has where each begins, and the end; `members` the
        conversations of all rows; `rows` where in it each row begins, and the end.
        """
        stem = self._opened[0] / split
        flat = cache.Mapped(stem.with_suffix(".tokens"), np.int32, mode="r")
        return {"tokens": flat, **np.load(stem.with_suffix(".npz"))}

    @cached_property
    def _opened(self) -> tuple[Path, dict[str, Any]]:
        files = self.check()
        folder = cache.root(self.cache_dir) / f"{self.kind}-{self._key(files)}"
        header = cache.open_or_build(folder, lambda part: self._build(part, files))
        if self.vocab_size is not None and header["largest_id"] >= self.vocab_size:
            size = self.loaded_tokenizer.get_vocab_size()
            raise ConfigError(
                f"data.source.tokenizer={self.tokenizer} has {size:,} tokens, and the model only "
                f"data.source.vocab_size={self.vocab_size}. Name the tokenizer of the model, or "
                "leave data.source.vocab_size out; for a model that begins at random type "
                f"data.source.vocab_size={size}."
            )
        return folder, header

    def _end_problem(self) -> str | None:
        """Return a problem if no token ends a turn: what serves the model could not stop at it."""
        end = self.chat_template.end_of_turn
        if end is None:
            return (
                "The chat template marks no end of the assistant's messages, or none could be "
                "found: the model may not learn to stop. Name another with data.source.template."
            )
        if len(self.loaded_tokenizer.encode(end, add_special_tokens=False).ids) == 1:
            return None
        remedy = (
            "Type data.source.template=plain, which ends them with the tokenizer's own last token."
        )
        return (
            f"data.source.template={self.template} ends the assistant's messages with {end}, which "
            f"is no token of {self.tokenizer_file}: no program would know where an answer ends. "
            f"{remedy if self.template != 'plain' else 'Name another tokenizer.'}"
        )

    def _key(self, files: list[SourceFile]) -> str:
        settings = [
            _VERSION,
            self.chat_template.source,
            dict(self.chat_template.special),
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
        lines = conversations.read(files, self.parse)
        with ExitStack() as opened, tokens.all_cores():
            writers = {
                split: Writer(opened.enter_context((part / f"{split}.tokens").open("wb")))
                for split in SPLITS
            }
            while some := list(islice(lines, _TOGETHER)):
                sides = [side for line in some for side in line]
                encoded = encode(sides, self.chat_template, self.loaded_tokenizer)
                for line in some:
                    split = sources.split_of(line[0].place, self.val_fraction, self.test_fraction)
                    self._add([*islice(encoded, len(line))], writers[split])
        statistics = {}
        for split, writer in writers.items():
            rows = self._rows_of([length - 1 for length in writer.lengths])
            starts, ends = (np.cumsum([0, *each]) for each in (writer.lengths, map(len, rows)))
            members = np.array([i for row in rows for i in row], np.int64)
            np.savez(part / f"{split}.npz", starts=starts, members=members, rows=ends)
            statistics[split] = {
                "conversations": len(writer.lengths),
                "rows": len(rows),
                **{name: writer.counts[name] for name in COUNTED},
            }
        train = statistics["train"]
        if train["read"] and not train["conversations"]:
            raise ConfigError(
                f"data.path={self.path}: of {train['read']:,} lines none is left for "
                f"training, since they are {LEFT_OUT}. Type a longer data.context than "
                f"{self.context} (data.source.too_long={self.too_long}), a lower "
                f"data.source.val_fraction, or name other files."
            )
        largest = max(writer.largest for writer in writers.values())
        return {"version": _VERSION, "splits": statistics, "largest_id": largest}

    def _add(self, sides: list[NDArray[np.int32]], writer: Writer) -> None:
        """Write the conversations of a line, unless they are left out."""
        writer.counts["read"] += 1
        # of n tokens, n - 1 are inputs, which predict the tokens after them
        kept = [side[: self.context + 1] for side in sides]
        cut = any(len(side) > self.context + 1 for side in sides)
        if (
            (cut and self.too_long == "drop")
            or (len(sides) > 1 and np.array_equal(kept[0], kept[1]))
            or not all((side[1:] >= 0).any() for side in kept)
        ):
            writer.counts["dropped"] += 1
            return
        writer.counts["cut"] += cut
        for side in kept:
            writer.add(side)

    def _rows_of(self, lengths: list[int]) -> list[list[int]]:
        """Return the conversations of each row, given their numbers of inputs."""
        if self.packing:
            return best_fit(lengths, room=self.context)
        return [[i] for i in range(len(lengths))]

    def _described(self, counts: dict[str, Any]) -> str:
        rows = counts["rows" if self.packing else "conversations"]
        words = {"cut": "cut to the context", "dropped": f"left out: {LEFT_OUT}"}
        return (
            f"{counts['conversations']:,} conversations in {counts['rows']:,} {self.unit} of "
            f"{self.context:,} tokens, {counts['tokens'] / max(rows * self.context, 1):.0%} "
            f"filled; {counts['targets'] / max(counts['tokens'], 1):.0%} of the tokens are the "
            "assistant's."
            + "".join(f" {counts[key]:,} {each}." for key, each in words.items() if counts[key])
        )


@dataclass(eq=False)
class Preferences(Conversations):
    """Pairs in JSON lines as tokens: row i of a split is its pair i, the chosen conversation and
    then the rejected one.

    As `Conversations`, but without packing (`conversations.parse_pair` says in which form). Pairs
    are held out by a hash of their prompt. One of which a side is too long is cut or dropped.
    """

    packing: bool = field(default=False, init=False)
    kind: ClassVar[str] = "preferences"
    unit: ClassVar[str] = "pairs"
    parse = staticmethod(conversations.parse_pair)

    @override
    def _rows_of(self, lengths: list[int]) -> list[list[int]]:
        return [[first, first + 1] for first in range(0, len(lengths), 2)]


def encode(
    some: Sequence[Conversation], template: ChatTemplate, tokenizer: Tokenizer
) -> Iterator[NDArray[np.int32]]:
    """Yield conversations as tokens: `t` if the model is to write it, else `~t`.

    A token counts as the assistant's if it has one of its characters.

    Raises ConfigError with the line of a conversation that the template cannot write.
    """
    rendered = []
    for each in some:
        try:
            rendered.append(template.assistant_spans(each.messages, tools=each.tools))
            text, spans = rendered[-1]
            text.encode()
            for i in each.learned:
                template.check_whole(each.messages[i], text[slice(*spans[i])], number=i + 1)
        except (NotRenderable, UnicodeEncodeError) as error:
            remedy = getattr(error, "remedy", NotRenderable.remedy)
            raise ConfigError(f"{each.where}: {error}. {remedy}.") from error
    encodings = tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
    for conversation, (_, spans), encoding in zip(some, rendered, encodings, strict=True):
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        ids = np.array(encoding.ids, np.int32)
        learned = np.zeros(len(ids), np.bool_)
        for i in conversation.learned:
            start, end = spans[i]
            learned |= (starts < end) & (ends > start)  # trimmed spaces have no length
        yield np.where(learned, ids, ~ids)


def token_ids(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the ids of tokens, whether they are learned or not."""
    return np.where(tokens < 0, ~tokens, tokens)


COUNTED = ("read", "cut", "dropped", "tokens", "targets")


@dataclass
class Writer:
    """Appends the conversations of one split to a file, and counts them."""

    file: BinaryIO
    largest: int = 0
    lengths: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, tokens: NDArray[np.int32]) -> None:
        self.counts["tokens"] += len(tokens) - 1
        self.counts["targets"] += int((tokens[1:] >= 0).sum())
        self.largest = max(self.largest, int(token_ids(tokens).max()))
        self.file.write(tokens.tobytes())
        self.lengths.append(len(tokens))
