"""A small tokenizer, chat templates of the usual styles, and conversations to write with them."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from armature.data import tokenizer as training

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen3's: thoughts of earlier turns are left out, the last turn has always some
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = '' %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ text }}{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + call | tojson + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STYLES = {"chatml": CHATML, "tagged": TAGGED, "trimmed": TRIMMED, "instruct": INSTRUCT, "thinking": THINKING}
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>",
]  # fmt: skip
CHAT = [
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "I am fine"},
    {"role": "user", "content": "world\n"},
    {"role": "assistant", "content": "thank you \n"},
]
CHATS = [{"prompt": f"how are {i}", "completion": "I am fine " * (i % 5 + 1)} for i in range(90)]


def small_tokenizer() -> Tokenizer:
    tokenizer = training.train(["hello world how are you I am fine thank you user assistant\n"] * 9, vocab_size=300)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.encode_special_tokens = False
    return tokenizer


def folder(path: Path, template: str | None = CHATML, *, bos: str = "<s>", eos: str = "<|im_end|>") -> Path:
    """Write a tokenizer's folder, as Hugging Face keeps it."""
    path.mkdir(parents=True, exist_ok=True)
    small_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": bos,
        "eos_token": {"__type": "AddedToken", "content": eos},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def write(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
