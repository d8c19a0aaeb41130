"""Chat templates: the text that they write, and which of it the assistant wrote, token by token."""

import json
import subprocess
from pathlib import Path

import pytest

from armature.data import tokenizer as tokens
from armature.data.chat import template
from armature.data.chat.conversations import Conversation
from armature.data.chat.source import encode
from armature.data.chat.template import ChatTemplate, NotRenderable
from armature.errors import ConfigError
from tests.data.chat_parts import CHAT, CHATML, INSTRUCT, SPECIAL, STYLES, TAGGED, THINKING, folder, small_tokenizer

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
# the text of CHAT in each style: what the assistant writes stands between ⟦ and ⟧
WRITTEN = {
    "chatml": "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n⟦I am fine<|im_end|>⟧\n"
    "<|im_start|>user\nworld\n<|im_end|>\n<|im_start|>assistant\n⟦thank you \n<|im_end|>⟧\n",
    "trimmed": "<s><|start_header_id|>user<|end_header_id|>\n\nhow are you<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦I am fine<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nworld<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦thank you<|eot_id|>⟧",
    "instruct": "<s>[INST] how are you [/INST] ⟦I am fine</s>⟧[INST] world\n [/INST] ⟦thank you \n</s>⟧",
    "thinking": "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n⟦I am fine<|im_end|>⟧\n"
    "<|im_start|>user\nworld\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦thank you \n<|im_end|>⟧\n",
}
WRITTEN["tagged"] = WRITTEN["chatml"]


def marked(source: str, messages: list, tools: list | None = None) -> str:
    """Return the text with ⟦ and ⟧ around what the assistant writes."""
    text, spans = ChatTemplate(source, SPECIALS).assistant_spans(messages, tools=tools)
    for start, end in sorted(spans.values(), reverse=True):
        text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text


@pytest.mark.parametrize("style", STYLES)
def test_what_the_assistant_writes_is_found(style):
    assert marked(STYLES[style], CHAT) == WRITTEN[style]


@pytest.mark.parametrize("style", STYLES)
def test_the_mask_is_right_token_by_token(style):
    conversation = Conversation("a", CHAT, None, (1, 3))
    tokenizer = small_tokenizer()
    [encoded] = encode([conversation], ChatTemplate(STYLES[style], SPECIALS), tokenizer)
    expected, inside = [], False
    for part in WRITTEN[style].replace("⟦", "\0⟦").replace("⟧", "\0⟧").split("\0"):
        inside = part.startswith("⟦") or (inside and not part.startswith("⟧"))
        ids = tokenizer.encode(part.strip("⟦⟧") if part[:1] in "⟦⟧" else part, add_special_tokens=False).ids
        expected += [(i, inside) for i in ids]
    if style == "instruct":  # here a token, " I", has the template's space and the answer's first letter
        expected = [(i, m) for i, m in zip(encoded.ids, encoded.learned.tolist(), strict=True)]
        first = tokenizer.decode([encoded.ids[i] for i in encoded.learned.nonzero()[0][:1]])
        assert first in (" I", "I")
        learned = tokenizer.decode([i for i, m in expected if m], skip_special_tokens=False)
        assert learned.replace(" thank", "thank").strip() == "I am fine</s>thank you \n</s>"
    assert list(zip(encoded.ids, encoded.learned.tolist(), strict=True)) == expected


def test_an_answer_that_is_not_learned_is_masked():
    [encoded] = encode([Conversation("a", CHAT, None, (3,))], ChatTemplate(CHATML), small_tokenizer())
    learned = small_tokenizer().decode(
        [encoded.ids[i] for i in encoded.learned.nonzero()[0]], skip_special_tokens=False
    )
    assert learned == "thank you \n<|im_end|>"


def test_thoughts_of_the_last_turn_are_learned_and_those_of_earlier_ones_left_out_as_the_template_does():
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfine"}] * 2
    text = marked(THINKING, chat)
    assert "assistant\n⟦fine<|im_end|>⟧\n" in text
    assert text.endswith("assistant\n⟦<think>\nhm\n</think>\n\nfine<|im_end|>⟧\n")


CALL = {"name": "add", "arguments": {"a": 1}}
CALLING = [
    CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}, CHAT[1]
]  # fmt: skip


@pytest.mark.parametrize("source", [THINKING, THINKING.replace("loop.index0 > ns.last", "false")])
def test_a_tool_call_is_learned_as_the_template_writes_it(source):
    source = source.replace("m.content.split", "(m.content or '').split").replace(
        "in m.content", "in (m.content or '')"
    )
    thought = "<think>\n\n</think>\n\n" if source.count("ns.last %}") else ""
    text = marked(source, CALLING)
    assert "⟧\n<|im_start|>tool\n2<|im_end|>\n" in text
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>⟧'
    assert call in text
    assert text.endswith(f"<|im_start|>assistant\n{thought}⟦I am fine<|im_end|>⟧\n")


@pytest.mark.parametrize("content", ["", None, "wait"])
def test_a_tool_call_that_the_template_does_not_write_is_refused(content):
    chat = [CHAT[0], {"role": "assistant", "content": content, "tool_calls": [CALL]}]
    with pytest.raises(NotRenderable):
        marked(CHATML, chat)


def test_thoughts_beside_the_content_are_learned():
    source = CHATML.replace("+ m['content']", "+ (m.reasoning_content or '') + m['content']")
    chat = [CHAT[0], {**CHAT[1], "reasoning_content": "hm. "}]
    assert marked(source, chat).endswith("assistant\n⟦hm. I am fine<|im_end|>⟧\n")


def test_characters_of_private_use_stay():
    assert "\ue002 \ue000" in marked(CHATML, [{"role": "user", "content": "\ue002 \ue000"}, CHAT[1]])


def test_truncation_and_padding_that_were_saved_are_forgotten(tmp_path):
    tokenizer = small_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = template.load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode("hello world how are you").ids == small_tokenizer().encode("hello world how are you").ids
    assert len(loaded.encode("h").ids) == 1


def test_a_template_that_needs_a_system_message_has_no_known_end():
    assert ChatTemplate("{{ raise_exception('no') if messages[0].role != 'system' }}").end_of_turn is None


def test_generation_tags_help_where_marks_cannot():
    rewritten = TAGGED.replace("m['content'] + '<|im_end|>'", "'ok ' * m['content'] | length + '<|im_end|>'", 1)
    assert marked(rewritten, CHAT[:2]).endswith("<|im_start|>assistant\n⟦" + "ok " * 9 + "<|im_end|>⟧\n")


def test_a_template_that_hides_the_answer_is_refused():
    with pytest.raises(NotRenderable, match="message 2 be found"):
        marked("{{ messages | length }}", CHAT[:2])


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


def test_a_template_that_is_no_jinja_is_refused():
    with pytest.raises(ConfigError, match="no Jinja2"):
        ChatTemplate("{% for %}").render(CHAT)


def test_a_date_is_the_same_each_day():
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(CHAT) == "26 Jul 2024"


@pytest.mark.parametrize(("style", "end"), [("chatml", "<|im_end|>"), ("trimmed", "<|eot_id|>"), ("instruct", "</s>")])
def test_the_end_of_a_turn_is_known(style, end):
    assert ChatTemplate(STYLES[style], SPECIALS).end_of_turn == end
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
    assert template.load(own, template=None) == ChatTemplate(CHATML, {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    (own / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        template.load(own, template=None)


@pytest.mark.parametrize("name", template.BUILT_IN)
def test_built_in_templates_learn_to_stop(name):
    built_in = ChatTemplate(template.BUILT_IN[name], SPECIALS)
    assert built_in.end_of_turn == ("</s>" if name == "plain" else "<|im_end|>")
    prompt = built_in.render(CHAT[:1], add_generation_prompt=True)
    assert built_in.render(CHAT[:2]).startswith(prompt + "I am fine")


TRANSFORMERS = """
import json, sys
from transformers import PreTrainedTokenizerFast
made = {}
for style, path in json.loads(sys.argv[1]).items():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    chat = json.loads(sys.argv[2])
    options = {"return_assistant_tokens_mask": style == "tagged"}
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **options)
    made[style] = [
        tokenizer.apply_chat_template(chat, tokenize=False), ids["input_ids"], ids.get("assistant_masks"),
        tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True),
    ]
print(json.dumps(made))
"""


@pytest.mark.slow
def test_texts_tokens_and_tagged_masks_are_those_of_transformers(tmp_path):
    python = Path(__file__).parents[2] / ".venv-extras/bin/python"
    if not python.exists():
        pytest.skip("transformers is not installed: make .venv-extras/.installed")
    paths = {style: str(folder(tmp_path / style, source, eos="</s>")) for style, source in STYLES.items()}
    command = [str(python), "-c", TRANSFORMERS, json.dumps(paths), json.dumps(CHAT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    for style, (text, ids, mask, prompt) in json.loads(result.stdout.splitlines()[-1]).items():
        own = template.load(Path(paths[style]), template=None)
        [encoded] = encode([Conversation("a", CHAT, None, (1, 3))], own, small_tokenizer())
        assert own.render(CHAT) == text
        assert own.render(CHAT[:1], add_generation_prompt=True) == prompt
        assert encoded.ids == ids
        if mask is not None:
            assert encoded.learned.tolist() == [bool(each) for each in mask]


def test_special_tokens_are_single_tokens():
    assert all(len(small_tokenizer().encode(token, add_special_tokens=False).ids) == 1 for token in SPECIAL)


# of a merge into a token that is not there, at which the library panics: what it raises is no Exception
PANIC = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}'


@pytest.mark.parametrize("content", ["{", "[1]", PANIC])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"data\.source\.tokenizer=.*tokenizer\.json is damaged.* Name a folder"):
        template.load_tokenizer(file)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is damaged.* Name a tokenizer\.json"):
        tokens.load_external(str(file))
