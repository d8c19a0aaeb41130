"""Chat templates: how a conversation becomes text, and which of its characters the assistant wrote.

Torch-free.

A template is Jinja2, as Hugging Face keeps it beside a tokenizer. It runs in a sandbox, without
transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from armature.data import tokenizer as tokens
from armature.data.sources import shown
from armature.errors import ConfigError, error_line
from armature.finetune import folder as model_folder

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

BUILT_IN = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "plain": "{% for m in messages %}{{ '### ' + m.role | capitalize + ':\n' + m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}",
}
# Templates that write the date get this one: with the day's, the same data would be other tokens
# tomorrow
DATE = date(2024, 7, 26)
# no characters, by Unicode: for a program's own use
_MARK, _BEGIN, _END = ("\ufdd0", "\ufdd1", "\ufdd2")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # the first that is there
_ALSO_WRITTEN = ("tool_calls", *_THOUGHTS)  # by the model, beside the content
# usual names of the last token of a text
_ENDS = ("</s>", "<eos>", "<|end_of_text|>", tokens.END_OF_TEXT)
# what rendering passes itself
_RENDERED = {"messages", "tools", "documents", "add_generation_prompt"}
_END_OF_TURN = r"<[^<>\s]{1,40}>"
_QUESTION, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_UNCHECKED = {"role", "tool_call_id"}  # of a message: a result's call is the one in its place
Message = dict[str, Any]
Span = tuple[int, int]


class NotRenderable(ValueError):
    """A conversation that the template cannot write, or whose assistant turns cannot be found in
    the text.
    """

    remedy = "Mend the line, or name another data.source.template"


class UnreadKey(NotRenderable):
    """A message holds what the template does not write, so that it would be lost."""

    remedy = "Rename the key or the role, remove it, or name another data.source.template"


class LeftOut(NotRenderable):
    """A message to learn is not written whole here, though it is in other conversations."""

    remedy = (
        "Write a line for each answer, with the conversation up to it, give the message "
        '"weight": 0, or name another data.source.template'
    )


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the names of special tokens that it may use (`bos_token`, `eos_token`, …)."""

    source: str
    special: Mapping[str, str] = field(default_factory=dict)
    # whether the template writes a key of a message of a role
    _written: dict[tuple[str, str], bool] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"data.source.template: the chat template is no Jinja2 ({error_line(error)}). Type "
                f"data.source.template={'|'.join(BUILT_IN)}, or the path of another."
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the conversation as text. Raises NotRenderable."""
        return re.sub(f"[{_BEGIN}{_END}]", "", self._render(messages, tools, add_generation_prompt))

    def _render(
        self, messages: Sequence[Message], tools: list[Any] | None, prompt: bool = False
    ) -> str:
        try:
            return self._compiled.render(
                messages=[_with_thoughts(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.special,
            )
        except ConfigError:
            raise
        except Exception as error:
            # a template can raise anything, such as a TypeError for a content of null
            raise NotRenderable(
                f"the chat template cannot write it ({error_line(error)[:200]})"
            ) from error

    def assistant_spans(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None
    ) -> tuple[str, dict[int, Span]]:
        """Return the text, and per index of an assistant message the characters that the model is
        to write.

        These are what the template makes of the message, and the mark of the turn's end after it:
        the model must learn to stop. They stand in the template's own {% generation %} tags, or are
        found by rendering the conversation once more per message, with a mark in its place. Raises
        NotRenderable.
        """
        marked = self._render(messages, tools)
        self._check_written(messages, tools)
        text = re.sub(f"[{_BEGIN}{_END}]", "", marked)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(tagged := _tagged(marked)) == len(turns):
            return text, dict(zip(turns, tagged, strict=True))
        found = {i: self._span(text, messages, i, tools) for i in turns}
        return text, {
            i: self._with_end(text, (self._begin(text, start, messages[:i], tools), end))
            for i, (start, end) in found.items()
        }

    def _begin(self, text: str, start: int, before: Sequence[Message], tools: Any) -> int:
        """Return where the model begins to write: at the space before an answer, if the prompt
        does not end with it (Llama 2, Mistral).
        """
        with suppress(NotRenderable):
            prompt = self.render(before, tools=tools, add_generation_prompt=True)
            # by its last characters: tools may stand elsewhere in it; it may be empty
            end = text[:start].rpartition(prompt[-20:] or text)[2]
            return start - len(end) if end.isspace() else start
        return start

    def _check_written(self, messages: Sequence[Message], tools: list[Any] | None) -> None:
        """Raise NotRenderable for a key that the template writes for no message of its role."""
        if tools and not self._writes("user", "tools", tools):
            raise NotRenderable("the chat template does not write the tools")
        for number, message in enumerate(messages, start=1):
            for key, value in message.items():
                empty = key in _UNCHECKED or value in (None, "", [], {})
                if not empty and not self._writes(message["role"], key, value):
                    raise UnreadKey(
                        f"the chat template does not read {key}={shown(value)} of message {number} "
                        f"({message['role']})"
                    )

    def check_whole(self, message: Message, written: str, *, number: int) -> None:
        """Raise LeftOut unless what the template wrote of a message has all of its texts, as
        thoughts of earlier turns that some templates leave out.
        """
        squeezed = "".join(written.split())
        for key in ("content", *_THOUGHTS):
            value = message.get(key)
            if isinstance(value, str) and "".join(value.split()) not in squeezed:
                raise LeftOut(
                    f"the chat template leaves out {key}={shown(value)} of message {number}, or a "
                    "part of it, in this conversation"
                )

    def _writes(self, role: str, key: str, value: Any) -> bool:
        """Return whether the text of a short conversation shows a key."""
        if role == "tool":  # which no short conversation begins with
            return True
        if (role, key) not in self._written:
            texts = []
            for given in ({}, {key: value}):
                tools = given.pop("tools", None)
                message = {"role": role, "content": _MARK, **given}
                begin = [_QUESTION] if role == "assistant" else []
                end = {"assistant": [], "user": [_ANSWER]}.get(role, [_QUESTION, _ANSWER])
                with suppress(NotRenderable):
                    texts.append(self._render([*begin, message, *end], tools))
            self._written[role, key] = len(texts) < 2 or texts[0] != texts[1]
        return self._written[role, key]

    def _span(
        self, text: str, messages: Sequence[Message], index: int, tools: list[Any] | None
    ) -> Span:
        """Return the span of one turn, by a mark in its place or by the text before and after the
        turn.
        """
        bare = {k: v for k, v in messages[index].items() if k not in _ALSO_WRITTEN} | {
            "content": _MARK
        }
        with suppress(NotRenderable):
            shadow = self.render([*messages[:index], bare, *messages[index + 1 :]], tools=tools)
            before, mark, after = shadow.partition(_MARK)
            # a template may put a space before words, and none before a call
            if not text.startswith(before):
                before = before.rstrip()
            fits = len(before) + len(after) <= len(text) and _MARK not in after
            if mark and fits and text.startswith(before) and text.endswith(after):
                return len(before), len(text) - len(after)
        with suppress(NotRenderable):  # where it changes the message
            start = self.render(messages[:index], tools=tools, add_generation_prompt=True)
            end = self.render(messages[: index + 1], tools=tools)
            if text.startswith(end) and end.startswith(start):
                closed = re.search(rf"({self._ends.pattern})\s*$", end)
                closes = closed is not None and closed.start() >= len(start)
                return len(start), closed.start() if closed and closes else len(end)
        raise NotRenderable(
            f"the chat template does not let message {index + 1} be found in its text"
        )

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """Matches the mark of a turn's end: an <angle> token, or the tokenizer's token for the
        end.
        """
        eos = self.special.get("eos_token")
        return re.compile(f"{re.escape(eos)}|{_END_OF_TURN}" if eos else _END_OF_TURN)

    def _with_end(self, text: str, span: Span) -> Span:
        closed = re.compile(rf"\s*({self._ends.pattern})").match(text, span[1])
        return span[0], closed.end() if closed else span[1]

    @cached_property
    def end_of_turn(self) -> str | None:
        """What the template writes after an assistant's message for the model to stop at.

        None: nothing is found.
        """
        try:
            text, spans = self.assistant_spans([_QUESTION, _ANSWER])
        except NotRenderable:
            return None
        start, end = spans[1]
        # thoughts have marks of their own
        closed = re.search(rf"({self._ends.pattern})\s*$", text[start:end])
        return closed.group(1) if closed else None


def _environment() -> jinja2.Environment:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": DATE.strftime}
    return environment


def _with_thoughts(message: Message) -> Message:
    """Return a message with its thoughts under the names that templates read, as transformers
    does.
    """
    found = (message.get(key) for key in _THOUGHTS)
    thoughts = next((each for each in found if each is not None), None)
    if thoughts is None:
        return message
    thinking = message.get("thinking")
    return {
        **message,
        "reasoning_content": thoughts,
        "thinking": thoughts if thinking is None else thinking,
    }


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise NotRenderable(message)


def _generation_tag() -> type[Any]:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}: what the model is to write, by the template's
        author.
        """

        tags = {"generation"}  # noqa: RUF012 — the base class's attribute

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation


def _tagged(marked: str) -> list[Span]:
    spans, length, start = [], 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", marked):
        if part == _BEGIN:
            start = length
        elif part == _END:
            spans.append((start, length))
        else:
            length += len(part)
    return spans


def load(
    folder: Path, *, template: str | None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """Return a tokenizer's chat template: the one typed (a built-in's name, or a file), else its
    folder's own.

    Args:
        arguments: values of variables that the template asks for, such as enable_thinking. They
            become a part of it, so that they hold wherever the run's template is used; who renders
            it may still pass others.

    Raises:
        ConfigError: there is none, a file cannot be read, or the template does not use an argument.
    """
    special = model_folder.special_tokens(folder)
    source = _typed(template) if template is not None else model_folder.chat_template(folder)
    if source is None:
        raise ConfigError(
            f"data.source.tokenizer={folder} has no chat template ({model_folder.CHAT_TEMPLATE}, "
            "or chat_template in "
            f"{model_folder.TOKENIZER_CONFIG}). Type data.source.template={'|'.join(BUILT_IN)}, or "
            "a .jinja file."
        )
    if "eos_token" not in special and (file := folder / tokens.TOKENIZER_FILE).is_file():
        loaded = load_tokenizer(file)
        special["eos_token"] = next(
            (each for each in _ENDS if loaded.token_to_id(each) is not None), ""
        )
    if arguments:
        _ = ChatTemplate(source)._compiled
        source = _defaults(source, arguments, passed=special) + source
    return ChatTemplate(source, special)


def _defaults(source: str, arguments: Mapping[str, Any], *, passed: Iterable[str]) -> str:
    """Return Jinja2 that gives variables these values if they have none. Raises ConfigError.

    Args:
        passed: variables that rendering gives values to.
    """
    from jinja2 import meta

    environment = _environment()
    used = meta.find_undeclared_variables(environment.parse(source)) - _RENDERED - {*passed}
    if unused := [name for name in arguments if name not in used]:
        there = ", ".join(sorted(used - {*environment.globals})) or "nothing"
        raise ConfigError(
            f"data.source.template_arguments={arguments}: the chat template does not ask for "
            f"{', '.join(unused)} "
            f"(it asks for: {there}). Leave it out."
        )
    return "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
        for name, value in arguments.items()
    )


def load_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer of a folder for conversations, whose templates write special tokens as
    text.
    """
    try:
        tokenizer = tokens.read(file)
    except ConfigError as error:
        raise ConfigError(f"data.source.tokenizer={error} Name a folder with another.") from error
    if problem := model_folder.tokens_problem(file):
        raise ConfigError(f"data.source.tokenizer={problem}")
    return tokenizer


def _typed(template: str) -> str:
    if template in BUILT_IN:
        return BUILT_IN[template]
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.source.template={template} cannot be read ({error_line(error)}). Type "
            f"{', '.join(BUILT_IN)}, or the "
            "path of a .jinja file."
        ) from error
