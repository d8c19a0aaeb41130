"""What a conversation holds is learned, or refused by name: nothing is dropped unread."""

import json

import numpy as np
import pytest

from armature.data.chat.source import Conversations, Preferences
from armature.errors import ConfigError
from tests.data.chat_parts import CHATML, REASONING, TOOLS

pytestmark = pytest.mark.guarantee

QUESTION = {"role": "user", "content": "how are you"}
ANSWER = {"role": "assistant", "content": "I am fine"}
ITEMS = CHATML.replace(
    "+ m['content']",
    "+ (m['content'] or '') }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ k + '=' + v | string }}{% endfor %}"
    "{% endfor %}{{ ''",
)
TEMPLATES = {"tojson": REASONING, "items": ITEMS}


def call(arguments, **more) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function, **more}]}


def messages(arguments) -> list:
    result = {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "fine"}
    return [QUESTION, call(arguments, id="call_1", type="function"), result, ANSWER]


FORMS = {
    "messages": (Conversations, lambda each: {"messages": each}),
    "completion": (Conversations, lambda each: {"prompt": each[:1], "completion": each[1:]}),
    "answers": (
        Preferences,
        lambda each: {"prompt": each[:1], "chosen": each[1:], "rejected": [ANSWER]},
    ),
    "prompt": (
        Preferences,
        lambda each: {"prompt": each[:3], "chosen": each[3:], "rejected": "no"},
    ),
    "whole": (
        Preferences,
        lambda each: {
            "chosen": each,
            "rejected": [*each[:3], QUESTION | ANSWER | {"content": "no"}],
        },
    ),
}


@pytest.fixture
def tokens(source_of, tmp_path):
    """Return the tokens of a record in this form, and which of them are learned."""

    def read(form: str, template: str, *records: list) -> dict:
        kind, make = FORMS[form]
        (tmp_path / "template.jinja").write_text(template)
        lines = [make(each) | {"id": 7, "source": "web", "tools": TOOLS} for each in records]
        if template != REASONING:
            lines = [{key: each[key] for key in each if key != "tools"} for each in lines]
        file = f"{form}.jsonl"
        settings = {"context": 512, "template": str(tmp_path / "template.jinja")}
        return source_of(kind, file, lines, **settings).arrays("train")

    return read


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("arguments", [{}, {"b": 18, "a": [1.5, None, {"c": "é\n"}]}])
def test_arguments_as_json_text_are_those_of_the_object(tokens, form, template, arguments):
    expected = tokens(form, TEMPLATES[template], messages(arguments))
    found = tokens(form, TEMPLATES[template], messages(json.dumps(arguments)))
    for name, array in expected.items():
        assert np.array_equal(array, found[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", ["", "a=3", "[1]", "null", "3", '"x"', '{"a": ', [1], None])
def test_arguments_that_are_no_object_are_refused(tokens, form, arguments):
    place = r"jsonl, line 1: \w+\[\d\]\.tool_calls\[0\]\.function\.arguments must be a JSON object"
    with pytest.raises(ConfigError, match=rf"{place}.* Got .*Write .*\{{\}} for none"):
        tokens(form, ITEMS, messages(arguments))


UNREAD = {
    "refusal": "I cannot", "audio": {"id": "a"}, "function_call": {"name": "add"},
    "reasoning_content": "hm", "thinking": "hm", "reasoning": "hm", "train": False, "prefix": True,
    "name": "Ann", "annotations": [1],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", UNREAD)
@pytest.mark.parametrize("content", ["", "I am fine"])
def test_a_key_that_nobody_reads_is_refused(tokens, form, key, content):
    unread = {"role": "assistant", "content": content, key: UNREAD[key]}
    with pytest.raises(
        ConfigError, match=rf"jsonl, line 1: .*does not read {key}=.*\(assistant\).*Rename the key"
    ):
        tokens(form, ITEMS, [QUESTION, ANSWER, QUESTION, unread])


@pytest.mark.parametrize("turn", [{"content": None}, {}])
@pytest.mark.parametrize("key", UNREAD)
def test_a_turn_without_content_is_no_lesson(tokens, key, turn):
    with pytest.raises(ConfigError, match=rf"content must be text. Got null beside {key}"):
        tokens("messages", ITEMS, [QUESTION, {"role": "assistant", **turn, key: UNREAD[key]}])


def test_keys_of_every_role_count_and_empty_ones_do_not(tokens):
    with pytest.raises(ConfigError, match=r"does not read name=\"Ann\" of message 1 \(user\)"):
        tokens("messages", REASONING, [QUESTION | {"name": "Ann"}, ANSWER])
    expected = tokens("messages", ITEMS, [QUESTION, ANSWER])
    empty = {"refusal": None, "audio": None, "annotations": [], "function_call": {}, "name": ""}
    found = tokens("messages", ITEMS, [QUESTION | empty, ANSWER | empty])
    assert np.array_equal(expected["tokens"], found["tokens"])


@pytest.mark.parametrize(
    "reads",
    ["m.name", "m['name']", "m.get('name')", "(m | tojson)", "(m.items() | list | string)"],
)
def test_a_key_is_read_however_the_template_asks_for_it(tokens, reads):
    template = CHATML.replace("+ m['content']", f"+ m['content'] + ({reads} or '')")
    people = [each | {"name": "Ann"} for each in (QUESTION, ANSWER)]
    assert len(tokens("messages", template, people)["tokens"])


def test_a_content_that_the_template_passes_over_is_refused(tokens):
    template = "{% for m in messages if m.role != 'developer' %}" + CHATML.split("%}", 1)[1]
    with pytest.raises(ConfigError, match=r"does not read content=.*message 1 \(developer\)"):
        tokens("messages", template, [QUESTION | {"role": "developer"}, QUESTION, ANSWER])
