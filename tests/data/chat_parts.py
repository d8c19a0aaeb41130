"""A small tokenizer, chat templates of the usual styles, and conversations to write with them."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from armature.data import tokenizer as training

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% "
    "generation %}"
    "{{ m['content'] + '</s>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '</s>\n' "
    "}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] "
    "+ ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen3's: thoughts of earlier turns are left out, the last turn has always some
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = '' %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + thought + "
    "'\n</think>\n\n' }}{% endif %}"
    "{{ text }}{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + call | tojson + "
    "'\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
STYLES = {
    "chatml": CHATML,
    "tagged": TAGGED,
    "trimmed": TRIMMED,
    "instruct": INSTRUCT,
    "thinking": THINKING,
}
# Of tools, in the manners of four families
# as Llama 3.1's: tools before the first user message, one call, results of the role ipython
HEADERS = (
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}{% set first = "
    "namespace(user=true) %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = "
    "messages[1:] %}{% endif %}"
    "{{ '<|eot_id|>' }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}{% "
    "else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'user' and first.user and tools %}{% set first.user = false %}{{ "
    "'Functions:\n' }}"
    "{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% "
    "endif %}"
    '{% set call = m.tool_calls[0].function %}{{ \'{"name": "\' + call.name + \'", "parameters": '
    "' }}"
    "{{ call.arguments | tojson + '}' }}{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' "
    "}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_CALLS = (
    '{% for call in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + '
    '\'", "arguments": \' '
    "+ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
)
_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content }}{% "
    "else %}"
    "{{ '<|im_start|>system\nYou help.' }}{% endif %}{% if tools %}{{ '\n<tools>' }}{% for tool in "
    "tools %}"
    "{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>' }}{% endif %}{{ '<|im_end|>\n' }}"
)
_RESULTS = (  # consecutive ones are one turn of the user's
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% "
    "endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
HERMES = (  # as Qwen2.5's: a system turn of its own, several calls, each in a tag
    f"{_SYSTEM}{{% for m in messages %}}{{% if m.role == 'tool' %}}{_RESULTS}{{% elif m.role != "
    f"'system' %}}"
    "{{ '<|im_start|>' + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    f"{_CALLS}{{{{ '<|im_end|>\n' }}}}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# as Qwen3's: thoughts after the last question alone, and empty ones in the prompt if they are
# turned off
REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    f"{{% endif %}}{{% endfor %}}{_SYSTEM}{{% for m in messages %}}{{% if m.role == 'tool' "
    f"%}}{_RESULTS}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% set text = m.content or '' "
    "%}"
    "{% set thought = m.reasoning_content or '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + "
    "'\n</think>\n\n' }}{% endif %}"
    f"{{{{ text }}}}{_CALLS}{{{{ '<|im_end|>\n' }}}}"
    "{% elif m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' "
    "}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' "
    "}}{% endif %}"
    "{% endif %}"
)
# as Mistral's: no mark of a turn's beginning, tools and the system's words before the last question
BRACKETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% "
    "endif %}{{ '[INST] ' }}"
    "{% if loop.index0 == ns.last and messages[0].role == 'system' %}{{ messages[0].content + "
    "'\n\n' }}{% endif %}"
    "{{ m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[CALLS] [' }}{% for call in "
    "m.tool_calls %}"
    "{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}{% elif m.role == "
    "'tool' %}"
    "{{ '[RESULTS] ' + m.content + '[/RESULTS]' }}{% endif %}{% endfor %}"
)
TOOL_STYLES = {"headers": HEADERS, "hermes": HERMES, "reasoning": REASONING, "brackets": BRACKETS}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TOOL_CHAT = [
    {"role": "system", "content": "hello"},
    {"role": "user", "content": "how are you"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "fine"},
    {"role": "assistant", "content": "I am fine"},
    {"role": "user", "content": "world"},
    {"role": "assistant", "content": "thank you"},
]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
]
CHAT = [
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "I am fine"},
    {"role": "user", "content": "world\n"},
    {"role": "assistant", "content": "thank you \n"},
]
CHATS = [{"prompt": f"how are {i}", "completion": "I am fine " * (i % 5 + 1)} for i in range(90)]


def small_tokenizer() -> Tokenizer:
    tokenizer = training.train(
        ["hello world how are you I am fine thank you user assistant\n"] * 9, vocab_size=300
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.encode_special_tokens = False
    return tokenizer


def folder(
    path: Path, template: str | None = CHATML, *, bos: str = "<s>", eos: str = "<|im_end|>"
) -> Path:
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
