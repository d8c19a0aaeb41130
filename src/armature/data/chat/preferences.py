"""Preferences: pairs of answers to one prompt, of which one was chosen: read, checked, rendered,
cached. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Literal

import numpy as np
from typing_extensions import override

from armature.data.chat import conversations
from armature.data.chat.conversations import Conversation, learned_of, messages, tools
from armature.data.chat.source import Conversations, Writer, left_out
from armature.data.chat.template import Message
from armature.data.sources import SourceFile, shown
from armature.errors import ConfigError

FORM = '{"prompt": "…", "chosen": "…", "rejected": "…"}'
SIDES = ("chosen", "rejected")
LEFT_OUT = (
    "too long, or their answers are empty or the same within the context, as text or as tokens"
)


@dataclass(frozen=True)
class Side(Conversation):
    """The prompt with one of its two answers, of which the answer is scored.

    Attributes:
        prompt: the number of messages that both sides begin with.
    """

    prompt: int

    @property
    @override
    def place(self) -> float:
        """As of a conversation, by the prompt alone: all pairs of a prompt are in one split."""
        return Conversation(self.where, self.messages[: self.prompt], self.tools, ()).place


def parse(record: object, *, where: str) -> tuple[Side, Side]:
    """Return the chosen and the rejected side of one record. Raises ConfigError.

    A record has `chosen` and `rejected`: answers to a `prompt` (or `messages`), each a text or a
    list of messages; or
    whole conversations, lists of messages whose common beginning is the prompt. `tools` go to the
    chat template.
    """
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: {shown(record)} is no object. Write {FORM}.")
    if missing := [side for side in SIDES if record.get(side) is None]:
        there = ", ".join(map(str, sorted(record))) or "nothing"
        raise ConfigError(f"{where}: no {' and no '.join(missing)} (there: {there}). Write {FORM}.")
    answers = [messages(record[side], side, where=where, role="assistant") for side in SIDES]
    if all(answer[0]["role"] != "assistant" for answer in answers):
        prompt = _common(*answers)
        # identical: all up to the last answer is the prompt
        if len(answers[0]) == len(answers[1]) == len(prompt):
            prompt = prompt[:-1]
        if not prompt:
            raise ConfigError(
                f"{where}: chosen and rejected are answers to different prompts. Remove the line."
            )
        answers = [answer[len(prompt) :] for answer in answers]
    else:
        key = next((key for key in ("prompt", "messages") if record.get(key) is not None), None)
        if key is None:
            raise ConfigError(
                f"{where}: no prompt, and chosen and rejected are no whole conversations. Write "
                f"{FORM}."
            )
        prompt = messages(record[key], key, where=where, role="user")
    return _side(record, "chosen", prompt, answers[0], where), _side(
        record, "rejected", prompt, answers[1], where
    )


def _side(
    record: dict[str, Any], key: str, prompt: list[Message], answer: list[Message], where: str
) -> Side:
    if answer and answer[0]["role"] != "assistant":
        raise ConfigError(
            f"{where}: {key} begins with a message of the role {answer[0]['role']} after the "
            "prompt, not with the "
            "assistant's answer. Both must answer the same prompt."
        )
    whole = [dict(message) for message in (*prompt, *answer)]
    learned = learned_of(whole, len(prompt))
    if not learned:
        raise ConfigError(
            f"{where}: {key} has no message of the role assistant after the prompt. Remove the "
            "line."
        )
    return Side(where, whole, tools(record, where=where), learned, len(prompt))


def _common(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    return [
        message
        for message, _ in takewhile(
            lambda each: each[0] == each[1], zip(chosen, rejected, strict=False)
        )
    ]


class Preferences(Conversations):
    """Pairs in JSON lines as tokens: row i of a split is its pair i, the chosen conversation and
    then the rejected one.

    As `Conversations`, with pairs held out by a hash of their prompt.

    Args:
        path: files, folders or patterns of .jsonl or .jsonl.gz (`parse` says in which form).
        tokenizer, template, template_arguments, vocab_size: as of `Conversations`.
        val_fraction, test_fraction, cache_dir: as of `Conversations`.
        context: tokens per conversation.
        too_long: what is done with a pair of which one side has more than `context` tokens: "cut"
            its end off, or "drop" the pair.
    """

    kind: ClassVar[str] = "preferences"

    def __init__(
        self,
        path: str | list[str],
        *,
        tokenizer: str | None,
        context: int,
        vocab_size: int | None = None,
        template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        too_long: Literal["cut", "drop"] = "cut",
        val_fraction: float = 0.05,
        test_fraction: float = 0.0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            path,
            tokenizer=tokenizer,
            context=context,
            vocab_size=vocab_size,
            template=template,
            template_arguments=template_arguments,
            packing=False,
            too_long=too_long,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            cache_dir=cache_dir,
        )

    @override
    def _write(self, files: list[SourceFile], writers: dict[str, Writer]) -> None:
        sides: Iterator[Side] = (side for pair in conversations.read(files, parse) for side in pair)
        encoded = self._encoded(sides)
        # one iterator: consecutive ones
        for chosen, rejected in zip(encoded, encoded, strict=True):
            writer = writers[self._split(chosen.conversation)]
            writer.counts["read"] += 1
            cut = any(len(side.ids) - 1 > self.context for side in (chosen, rejected))
            kept = [side.up_to(self.context + 1) for side in (chosen, rejected)]
            same = kept[0].ids == kept[1].ids and np.array_equal(kept[0].learned, kept[1].learned)
            dropped = (cut and self.too_long == "drop") or same
            if dropped or not all(side.has_targets for side in kept):
                writer.counts["dropped"] += 1
                continue
            writer.counts["cut"] += cut
            for side in kept:
                writer.add(side)

    @override
    def _rows_of(self, lengths: list[int]) -> list[list[int]]:
        return [[first, first + 1] for first in range(0, len(lengths), 2)]

    @override
    def _described(self, counts: dict[str, Any]) -> str:
        pairs = counts["rows"]
        scored = counts["targets"] / max(counts["tokens"], 1)
        return (
            f"{pairs:,} pairs, {counts['tokens'] / max(2 * pairs, 1):,.0f} tokens per conversation "
            f"on average; {scored:.0%} of them are the answers'." + left_out(counts, LEFT_OUT)
        )

    @override
    def _nothing_left(self, counts: dict[str, Any]) -> str:
        if not counts["read"]:
            return (
                f"data.path={self.path}: no pair is left for training. Name more of them, or lower "
                f"data.source.val_fraction={self.val_fraction}."
            )
        return (
            f"data.path={self.path}: of {counts['read']:,} pairs none is left for training."
            f"{left_out(counts, LEFT_OUT)} Type a longer data.context than {self.context}, or name "
            "other pairs."
        )
