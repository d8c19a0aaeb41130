"""Chat templates: the text that they write, and which of it the assistant wrote, token by token."""

import json

import pytest

from armature.data.chat import template
from armature.data.chat.conversations import Conversation
from armature.data.chat.source import encode, token_ids
from armature.data.chat.template import ChatTemplate, NotRenderable
from armature.errors import ConfigError
from armature.finetune import folder as model_folder
from tests import needs
from tests.data.chat_parts import (
    CHAT,
    CHATML,
    INSTRUCT,
    STYLES,
    TAGGED,
    TOOL_CHAT,
    TOOL_STYLES,
    TOOLS,
    folder,
    small_tokenizer,
)
from tests.finetune import extras
from tests.finetune.folders import write_model

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
# the text of CHAT in each style: what the assistant writes stands between ⟦ and ⟧
WRITTEN = {
    "chatml": "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n⟦I am "
    "fine<|im_end|>⟧\n"
    "<|im_start|>user\nworld\n<|im_end|>\n<|im_start|>assistant\n⟦thank you \n<|im_end|>⟧\n",
    "trimmed": "<s><|start_header_id|>user<|end_header_id|>\n\nhow are you<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦I am fine<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nworld<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦thank you<|eot_id|>⟧",
    "instruct": "<s>[INST] how are you [/INST]⟦ I am fine</s>⟧[INST] world\n [/INST]⟦ thank you "
    "\n</s>⟧",
    "thinking": "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n⟦I am "
    "fine<|im_end|>⟧\n"
    "<|im_start|>user\nworld\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦thank you "
    "\n<|im_end|>⟧\n",
    "tagged": "<s>user\nhow are you</s>\n<s>assistant\n⟦I am fine</s>⟧\n"
    "<s>user\nworld\n</s>\n<s>assistant\n⟦thank you \n</s>⟧\n",
}
SCHEMA = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
# the text of TOOL_CHAT with TOOLS
WRITTEN_TOOLS = {
    "headers": "<s><|start_header_id|>system<|end_header_id|>\n\nhello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n"
    f"{json.dumps(TOOLS[0], indent=4)}\n\nhow are you<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '⟦{"name": "add", "parameters": {"a": '
    '1}}<|eot_id|>⟧<|start_header_id|>ipython<|end_header_id|>\n\n"fine"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦I am fine<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nworld<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦thank you<|eot_id|>⟧",
    "hermes": f"<|im_start|>system\nhello\n<tools>\n{SCHEMA}\n</tools><|im_end|>\n"
    "<|im_start|>user\nhow are you<|im_end|>\n"
    '<|im_start|>assistant\n⟦<tool_call>\n{"name": "add", "arguments": {"a": '
    "1}}\n</tool_call><|im_end|>⟧\n"
    "<|im_start|>user\n<tool_response>\nfine\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n⟦I am fine<|im_end|>⟧\n"
    "<|im_start|>user\nworld<|im_end|>\n<|im_start|>assistant\n⟦thank you<|im_end|>⟧\n",
    "reasoning": f"<|im_start|>system\nhello\n<tools>\n{SCHEMA}\n</tools><|im_end|>\n"
    "<|im_start|>user\nhow are you<|im_end|>\n"
    '<|im_start|>assistant\n⟦\n<tool_call>\n{"name": "add", "arguments": {"a": '
    "1}}\n</tool_call><|im_end|>⟧\n"
    "<|im_start|>user\n<tool_response>\nfine\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n⟦I am fine<|im_end|>⟧\n"
    "<|im_start|>user\nworld<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦thank "
    "you<|im_end|>⟧\n",
    "brackets": '<s>[INST] how are you[/INST]⟦[CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>⟧'
    f"[RESULTS] fine[/RESULTS]⟦ I am fine</s>⟧[TOOLS][{SCHEMA}][/TOOLS][INST] "
    "hello\n\nworld[/INST]⟦ thank you</s>⟧",
}


def marked(source: str, messages: list, tools: list | None = None) -> str:
    """Return the text with ⟦ and ⟧ around what the assistant writes."""
    text, spans = ChatTemplate(source, SPECIALS).assistant_spans(messages, tools=tools)
    for start, end in sorted(spans.values(), reverse=True):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


def expected_tokens(written: str) -> list[tuple[int, bool]]:
    """Return the ids of a text, part by part, and which of them stand between ⟦ and ⟧.

    No token spans two parts, but for a space before a word, which is the word's.
    """
    expected, inside = [], False
    for part in written.replace(" ⟦", "⟦ ").replace("⟦", "\0⟦").replace("⟧", "\0⟧").split("\0"):
        inside = part.startswith("⟦") or (inside and not part.startswith("⟧"))
        ids = small_tokenizer().encode(part.strip("⟦⟧"), add_special_tokens=False).ids
        expected += [(i, inside) for i in ids]
    return expected


CASES = {  # template, messages, tools, which messages are learned, the text
    **{style: (STYLES[style], CHAT, None, (1, 3), WRITTEN[style]) for style in STYLES},
    **{
        style: (TOOL_STYLES[style], TOOL_CHAT, TOOLS, (2, 4, 6), WRITTEN_TOOLS[style])
        for style in TOOL_STYLES
    },
}


@pytest.mark.parametrize(
    ("source", "messages", "tools", "learned", "written"), CASES.values(), ids=CASES
)
def test_the_mask_is_right_token_by_token(source, messages, tools, learned, written):
    assert marked(source, messages, tools) == written
    conversation = Conversation("a", messages, tools, learned)
    [encoded] = encode([conversation], ChatTemplate(source, SPECIALS), small_tokenizer())
    found = list(zip(token_ids(encoded).tolist(), (encoded >= 0).tolist(), strict=True))
    assert found == expected_tokens(written)


def test_arguments_are_kept_in_the_template(tmp_path):
    source = (
        "  {% if a is defined %}{{ a }}{% endif %}{% macro m() %}{{ b.c[0] }}{% endmacro "
        "%}{{ m() }}{{ bos_token }}"
    )
    own = folder(tmp_path / "own", source)
    arguments = {"a": "x'%}\n", "b": {"c": [None, 1.5, True]}}
    loaded = template.load(own, template=None, arguments=arguments)
    expected = ChatTemplate(source, {**loaded.special, **arguments}).render([])
    assert loaded.render([]) == expected == "x'%}\nNone<s>"
    (own / "chat_template.jinja").write_text(loaded.source)  # as a run keeps it
    assert template.load(own, template=None).render([]) == expected
    assert ChatTemplate(loaded.source, {"a": "other", "b": {"c": "y"}}).render([]) == "othery"


CALL = {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize("content", ["", None, "wait"])
def test_a_tool_call_that_the_template_does_not_write_is_refused(content):
    chat = [CHAT[0], {"role": "assistant", "content": content, "tool_calls": [CALL]}]
    with pytest.raises(NotRenderable):
        marked(CHATML, chat)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_reach_a_template_under_any_of_their_names(key):
    chat = [CHAT[0], {**CHAT[1], key: "hm. "}]
    for name in ("reasoning_content", "thinking"):
        source = CHATML.replace("+ m['content']", f"+ (m.{name} or '') + m['content']")
        assert marked(source, chat).endswith("assistant\n⟦hm. I am fine<|im_end|>⟧\n")
    assert chat[1] == {**CHAT[1], key: "hm. "}


@pytest.mark.parametrize("place", [model_folder.TOKENIZER_CONFIG, model_folder.TOOL_TEMPLATE])
def test_conversations_with_tools_are_written_by_a_template_of_their_own(tmp_path, place):
    own = folder(tmp_path / "own", CHATML)
    plain, tools = "\n  {% if 1 %}p{% endif %}\n  \n", "\n {{ tools | length }}{% set a = 1 %}\n\n"
    if place == model_folder.TOOL_TEMPLATE:
        (own / "chat_template.jinja").write_text(plain)
        (own / place).parent.mkdir()
        (own / place).write_text(tools)
    else:
        (own / "chat_template.jinja").unlink()
        named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tools}]
        (own / place).write_text(json.dumps({"chat_template": named}))
    loaded = template.load(own, template=None)
    assert loaded.render(CHAT) == ChatTemplate(plain).render(CHAT)
    assert (
        loaded.render(CHAT, tools=TOOLS) == ChatTemplate(tools).render(CHAT, tools=TOOLS) == "\n 1"
    )
    run = tmp_path / "run"
    model_folder.keep(write_model(tmp_path / "model"), run)
    model_folder.copy(own / place, run / model_folder.KEPT / place)
    model_folder.copy(own / "chat_template.jinja", run / model_folder.KEPT / "chat_template.jinja")
    assert template.load(run / model_folder.KEPT, template=None).source == loaded.source


def test_generation_tags_help_where_marks_cannot():
    rewritten = TAGGED.replace("m['content'] + '</s>'", "'ok ' * m['content'] | length + '</s>'", 1)
    assert marked(rewritten, CHAT[:2]).endswith("<s>assistant\n⟦" + "ok " * 9 + "</s>⟧\n")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ messages[9].content + 1 }}", "cannot write it"),
        ("{{ messages.__class__.__mro__ }}", "cannot write it"),
        ("{{ messages.append(1) }}", "cannot write it"),
        ("{% for i in range(10**9) %}{% endfor %}", "cannot write it"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(source, says):
    with pytest.raises(NotRenderable, match=says):
        ChatTemplate(source).render(CHAT)


ENDS = {
    "chatml": "<|im_end|>",
    "trimmed": "<|eot_id|>",
    "instruct": "</s>",
    "thinking": "<|im_end|>",
    "headers": "<|eot_id|>",
    "hermes": "<|im_end|>",
    "reasoning": "<|im_end|>",
    "brackets": "</s>",
    "plain": "</s>",
}


def test_the_end_of_a_turn_is_known():
    sources = {**template.BUILT_IN, **STYLES, **TOOL_STYLES}
    found = {style: ChatTemplate(sources[style], SPECIALS).end_of_turn for style in ENDS}
    assert found == ENDS
    assert ChatTemplate("{% for m in messages %}{{ m.content }} {% endfor %}").end_of_turn is None


def test_templates_are_found_where_the_tools_keep_them(tmp_path):
    own = folder(tmp_path / "a", CHATML)
    assert template.load(own, template=None).source == CHATML
    assert template.load(own, template="plain").source == template.BUILT_IN["plain"]
    (own / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"template=chatml\|plain"):
        template.load(own, template=None)
    settings = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": INSTRUCT}))
    assert template.load(own, template=None).source == INSTRUCT
    several = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]
    (own / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": several}))
    assert template.load(own, template=None) == ChatTemplate(
        CHATML, {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    )
    (own / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        template.load(own, template=None)


@pytest.mark.parametrize("name", template.BUILT_IN)
def test_built_in_templates_begin_an_answer_as_they_write_it(name):
    built_in = ChatTemplate(template.BUILT_IN[name], SPECIALS)
    prompt = built_in.render(CHAT[:1], add_generation_prompt=True)
    assert built_in.render(CHAT[:2]).startswith(prompt + "I am fine")


TRANSFORMERS = """
import json, sys
from transformers import PreTrainedTokenizerFast
made = {}
for style, path, chat, tools in json.loads(sys.argv[1]):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    options = {"return_assistant_tokens_mask": style == "tagged"}
    write = tokenizer.apply_chat_template
    ids = write(chat, tools=tools, tokenize=True, return_dict=True, **options)
    made[style] = [
        write(chat, tools=tools, tokenize=False), ids["input_ids"], ids.get("assistant_masks"),
        write(chat[:2], tools=tools, tokenize=False, add_generation_prompt=True),
    ]
print(json.dumps(made))
"""


@pytest.mark.guarantee
@pytest.mark.slow
def test_texts_tokens_and_tagged_masks_are_those_of_transformers(tmp_path):
    needs.extra("transformers")
    paths = {
        style: folder(tmp_path / style, source, eos="</s>") for style, (source, *_) in CASES.items()
    }
    cases = [(style, str(paths[style]), *CASES[style][1:3]) for style in CASES]
    printed = extras.run("-c", TRANSFORMERS, json.dumps(cases)).stdout
    for style, (text, ids, mask, prompt) in json.loads(printed.splitlines()[-1]).items():
        _, chat, tools, learned, _ = CASES[style]
        own = template.load(paths[style], template=None)
        [encoded] = encode([Conversation("a", chat, tools, learned)], own, small_tokenizer())
        assert own.render(chat, tools=tools) == text
        assert own.render(chat[:2], tools=tools, add_generation_prompt=True) == prompt
        assert token_ids(encoded).tolist() == ids
        if mask is not None:
            assert (encoded >= 0).tolist() == [bool(each) for each in mask]
