"""Preferences: pairs of answers to one prompt, of which one was chosen. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, ClassVar, Literal

from typing_extensions import override

from armature.data.chat import conversations
from armature.data.chat.conversations import Conversation, messages
from armature.data.chat.source import Conversations
from armature.errors import ConfigError

FORM = '{"prompt": "…", "chosen": "…", "rejected": "…"}'
SIDES = ("chosen", "rejected")


def parse(record: object, *, where: str) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of one record. Raises ConfigError.

    A record has `chosen` and `rejected`: answers to a `prompt` (or `messages`), each a text or a
    list of messages; or whole conversations, lists of messages whose common beginning is the
    prompt. `tools` go to the chat template.
    """
    record = conversations.checked(record, FORM, where=where)
    if missing := [side for side in SIDES if record.get(side) is None]:
        there = conversations.there(record)
        raise ConfigError(f"{where}: no {' and no '.join(missing)} (there: {there}). Write {FORM}.")
    answers = [messages(record[side], side, where=where, role="assistant") for side in SIDES]
    if all(answer[0]["role"] != "assistant" for answer in answers):
        pairs = zip(*answers, strict=False)
        prompt = [message for message, _ in takewhile(lambda each: each[0] == each[1], pairs)]
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
    for side, answer in zip(SIDES, answers, strict=True):
        if answer and answer[0]["role"] != "assistant":
            raise ConfigError(
                f"{where}: {side} begins with a message of the role {answer[0]['role']} after the "
                "prompt, not with the assistant's answer. Both must answer the same prompt."
            )
    size = len(prompt)
    chosen, rejected = (
        conversations.made(record, prompt + answer, size, where=f"{where}: {side}", prompt=size)
        for side, answer in zip(SIDES, answers, strict=True)
    )
    return chosen, rejected


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
    unit = "pairs"
    parse = staticmethod(parse)
    sides = 2

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
    def _rows_of(self, lengths: list[int]) -> list[list[int]]:
        return [[first, first + 1] for first in range(0, len(lengths), 2)]
