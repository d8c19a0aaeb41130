"""Conversations, and pairs of answers to one prompt of which one was chosen, in JSON lines: checked
and brought into one form. Torch-free.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, TypeVar

from armature.data import sources
from armature.data.chat.template import Message
from armature.data.sources import SourceFile
from armature.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")
_READ = {"messages", "prompt", "completion", "chosen", "rejected", "system", "tools"}
_SHOWN = 10  # problems in one message
_EITHER = '"…", or [{"role": "user", "content": "…"}]'
_CALL = '{"type": "function", "function": {"name": "…", "arguments": {}}}'
PAIR_FORM = '{"prompt": "…", "chosen": "…", "rejected": "…"}'
SIDES = ("chosen", "rejected")
FORM = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools that the assistant may call, and which messages are learned from.

    Attributes:
        where: its file and line, for messages.
        learned: indices of assistant messages.
        prompt: the number of messages that decide the split; None: all.
    """

    where: str
    messages: list[Message]
    tools: list[Any] | None
    learned: tuple[int, ...]
    prompt: int | None = None

    @property
    def place(self) -> float:
        """A number in [0, 1) that depends on the content alone: equal conversations, and all pairs
        of a prompt, are never in two splits.
        """
        decides = [self.messages[: self.prompt], self.tools]
        return sources.hash_place(json.dumps(decides, sort_keys=True, ensure_ascii=False))


def read(files: list[SourceFile], parse: Callable[..., T]) -> Iterator[T]:
    """Yield what `parse(record, where=…)` makes of each line.

    Raises ConfigError with the bad lines, at most ten.
    """
    problems: list[str] = []
    unread: set[str] = set()
    for where, record in chain.from_iterable(map(sources.json_lines, files)):
        unread |= record.keys() - _READ if isinstance(record, dict) else set()
        try:
            parsed = parse(record, where=where)
        except ConfigError as error:
            problems += error.problems
            if len(problems) >= _SHOWN:
                raise ConfigError([*problems, "There may be more such lines."]) from None
            continue
        if not problems:
            yield parsed
    if problems:
        raise ConfigError(problems)
    if unread:
        log.info("Keys of the lines that nothing reads: %s.", ", ".join(sorted(unread)))


def parse(record: object, *, where: str) -> tuple[Conversation]:
    """Return the conversation of one record. Raises ConfigError.

    A record has `messages`, or `prompt` and `completion`, each a text or a list of messages; of
    these only the completion is learned. A text `system` becomes the first message. `tools` go to
    the chat template. An assistant message with `"weight": 0` is not learned.
    """
    if "messages" in (record := checked(record, FORM, where=where)):
        read, first = messages(record["messages"], "messages", where=where), 0
    elif "prompt" in record and "completion" in record:
        prompt = messages(record["prompt"], "prompt", where=where, role="user")
        read = prompt + messages(record["completion"], "completion", where=where, role="assistant")
        first = len(prompt)
    else:
        raise ConfigError(
            f"{where}: neither messages, nor prompt and completion (there: {there(record)}). Write "
            f"{FORM}."
        )
    return (made(record, read, first, where=where),)


def parse_pair(record: object, *, where: str) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of one record. Raises ConfigError.

    A record has `chosen` and `rejected`: answers to a `prompt` (or `messages`), each a text or a
    list of messages; or whole conversations, lists of messages whose common beginning is the
    prompt. `tools` go to the chat template.
    """
    record = checked(record, PAIR_FORM, where=where)
    if missing := [side for side in SIDES if record.get(side) is None]:
        raise ConfigError(
            f"{where}: no {' and no '.join(missing)} (there: {there(record)}). Write {PAIR_FORM}."
        )
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
                f"{PAIR_FORM}."
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
        made(record, prompt + answer, size, where=f"{where}: {side}", prompt=size)
        for side, answer in zip(SIDES, answers, strict=True)
    )
    return chosen, rejected


def checked(record: object, form: str, *, where: str) -> dict[str, Any]:
    """Return a record that is an object. Raises ConfigError."""
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: {sources.shown(record)} is no object. Write {form}.")
    return record


def there(record: dict[str, Any]) -> str:
    """Return the keys of a record, for messages."""
    return ", ".join(sorted(record)) or "nothing"


def made(
    record: dict[str, Any],
    read: list[Message],
    first: int,
    *,
    where: str,
    prompt: int | None = None,
) -> Conversation:
    """Return the conversation of a record's messages, of which those from `first` on are learned.

    Raises ConfigError.
    """
    learned = tuple(
        i
        for i, message in enumerate(read)
        if i >= first and message["role"] == "assistant" and message.get("weight", 1)
    )
    if not learned:
        roles = ", ".join(sorted({message["role"] for message in read}))
        raise ConfigError(
            f"{where}: no message of the role assistant, or all with weight 0, so there is nothing "
            f"to learn (roles: {roles}). Rename the role, or remove the line."
        )
    tools = _without_nulls(record.get("tools"))
    if record.get("system") and read[0]["role"] != "system":
        read = messages(record["system"], "system", where=where, role="system") + read
        learned = tuple(i + 1 for i in learned)
        prompt = None if prompt is None else prompt + 1
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(
            f"{where}: tools must be a list. Got {sources.shown(tools)}. Write a list of JSON "
            "schemas."
        )
    # what is learned is known now: no template asks for weights
    read = [{k: v for k, v in message.items() if k != "weight"} for message in read]
    return Conversation(where, read, tools or None, learned, prompt)


def messages(value: object, key: str, *, where: str, role: str | None = None) -> list[Message]:
    """Return a record's messages; of a text one of that role, if a role is given.

    Raises ConfigError.
    """
    if isinstance(value, str) and role is not None:
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where}: {key} must be {'' if role is None else 'a text or '}a list of messages. Got "
            f"{sources.shown(value)}. Write {FORM if role is None else _EITHER}."
        )
    return [_message(each, where=f"{where}: {key}[{number}]") for number, each in enumerate(value)]


def _message(value: object, *, where: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ConfigError(
            f"{where} has no role and content. Got {sources.shown(value)}. Write {FORM}."
        )
    # an optional key of null is none: tables that were made into JSON lines have such ones
    value = {key: each for key, each in value.items() if each is not None or key == "content"}
    content, calls = value.get("content"), value.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ConfigError(
            f"{where}: tool_calls must be a list. Got {sources.shown(calls)}. Write a list of "
            "calls."
        )
    if calls:
        value["tool_calls"] = [
            _call(call, where=f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    if value.get("weight", 1) not in (0, 1):
        raise ConfigError(
            f"{where}: weight must be 1, or 0 for a message not to learn. Got "
            f"{sources.shown(value['weight'])}."
        )
    if content is None and value["role"] == "assistant" and calls:
        return value  # templates may ask whether it is none
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(each["text"] for each in content)
    if not isinstance(content, str):
        others = ", ".join(sorted(value.keys() - {"role", "content", "weight"}))
        instead = f" beside {others}" if content is None and others else ""
        raise ConfigError(
            f"{where}: content must be text. Got {sources.shown(content)}{instead}. Images and "
            "sound are not read, and calls only as tool_calls."
        )
    return {**value, "content": content}


def _is_text(part: object) -> bool:
    """Return whether a part of a content is text and nothing else."""
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and not any(part[key] for key in part.keys() - {"type", "text"})
    )


def _call(call: object, *, where: str) -> object:
    """Return a tool call with its arguments as an object: OpenAI's are a JSON text of one.

    Raises ConfigError.
    """
    if not isinstance(call, dict):
        raise ConfigError(f"{where} must be an object. Got {sources.shown(call)}. Write {_CALL}.")
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _call(function, where=f"{where}.function")}
    if "arguments" not in call:
        return call
    arguments = given = _without_nulls(call["arguments"])
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"{where}.arguments must be a JSON object, or a text of one. Got "
            f'{sources.shown(given)}. Write {{"name": value}}, or {{}} for none.'
        )
    return {**call, "arguments": arguments}


def _without_nulls(value: Any) -> Any:
    """Return a value without entries of null: tables that were made into JSON lines have such
    ones.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value
