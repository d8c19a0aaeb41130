"""Conversations: what is read, refused, cut and held out, and how rows are packed."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armature.checkpoint import state
from armature.data.chat.conversations import parse
from armature.data.chat.data import ChatData
from armature.data.chat.packing import best_fit
from armature.data.chat.source import Conversations, token_ids
from armature.errors import ConfigError
from armature.models.loss import IGNORED
from tests import in_process, running
from tests.data.chat_parts import CHAT, small_tokenizer, write


def chat(i: int, answer: str = "fine") -> dict:
    return {
        "messages": [
            {"role": "user", "content": f"how {i}"},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.fixture
def source(source_of):
    return partial(source_of, Conversations, "chats.jsonl")


def data(source: Conversations) -> ChatData:
    return ChatData(source, context=source.context)


@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_puts_each_index_into_one_row_that_has_room(lengths):
    rows = best_fit(lengths, room=50)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)
    assert (
        sum(2 * sum(lengths[i] for i in row) <= 50 for row in rows) <= 1
    )  # two such rows would have been one
    assert rows == sorted(rows)


def test_targets_are_the_tokens_after_the_inputs_where_the_assistant_wrote(source):
    rows = data(source([{"messages": CHAT}, chat(1)], context=96)).dataset("train")
    batch = rows.batch([0])
    assert len(rows) == 1
    tokenizer = small_tokenizer()
    learned = [t for t in batch["targets"][0].tolist() if t != IGNORED]
    expected = "I am fine<|im_end|>thank you \n<|im_end|>fine<|im_end|>"
    assert tokenizer.decode(learned, skip_special_tokens=False) == expected
    inputs, targets, documents = (
        batch[name][0].tolist() for name in ("inputs", "targets", "documents")
    )
    for i in range(95):
        if targets[i] != IGNORED and documents[i + 1] == documents[i]:
            assert inputs[i + 1] == targets[i]
    assert documents[0] == 0
    assert documents[-1] == 2  # the padding
    assert {t for t, d in zip(targets, documents, strict=True) if d == 2} == {IGNORED}


def test_long_conversations_are_cut_or_dropped_and_counted(source):
    records = [
        chat(0),
        chat(1, "fine " * 80),
        {"messages": [{"role": "user", "content": "how " * 90}, CHAT[1]]},
    ]
    cut = source(records).header["splits"]["train"]
    assert (cut["conversations"], cut["cut"], cut["dropped"]) == (2, 1, 1)
    dropped = source(records, too_long="drop").header["splits"]["train"]
    assert (dropped["conversations"], dropped["cut"], dropped["dropped"]) == (1, 0, 2)
    assert (data(source(records)).dataset("train").batch([0])["targets"] != IGNORED).any()


def test_a_context_that_leaves_nothing_to_learn_is_refused(source):
    with pytest.raises(ConfigError, match="of 3 lines none is left for training"):
        source([chat(i) for i in range(3)], context=4).prepare()


def test_equal_conversations_are_held_out_together_and_stay_when_others_come(source, tmp_path):
    first = source([chat(i % 30) for i in range(60)], val_fraction=0.3, test_fraction=0.2)
    texts = {split: _texts(first, split) for split in ("train", "val", "test")}
    assert all(texts[split] for split in texts)
    assert not texts["train"] & (texts["val"] | texts["test"])
    assert not texts["val"] & texts["test"]
    more = source([chat(i) for i in range(100)], val_fraction=0.3, test_fraction=0.2)
    assert texts["val"] <= _texts(more, "val")
    whole = source([chat(0)], val_fraction=0, test_fraction=1)
    assert data(whole).dataset("train") is None
    assert len(_texts(whole, "test")) == 1


def _texts(source: Conversations, split: str) -> set[str]:
    arrays = source.arrays(split)
    parts = zip(arrays["starts"][:-1], arrays["starts"][1:], strict=True)
    ids = token_ids(arrays["tokens"])
    return {source.loaded_tokenizer.decode(ids[a:b].tolist()) for a, b in parts}


def test_prompt_and_completion_are_a_conversation_of_which_the_completion_is_learned():
    (plain,) = parse({"prompt": "a", "completion": "b"}, where="here")
    assert plain.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert plain.learned == (1,)
    assert parse({"prompt": CHAT, "completion": "b"}, where="here")[0].learned == (4,)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([1], "[1] is no object"),
        ({"text": "a"}, "neither messages, nor prompt and completion (there: text)"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [{"from": "human", "value": "a"}]}, "messages[0] has no role and content"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "content must be text. Got 3"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]},
            "Images and sound are not read",
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "(roles: assistant, user)"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]},
            "messages[1]: weight must be 1, or 0",
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": "0"}]}, 'Got "0"'),
        ({"messages": CHAT, "tools": "add"}, 'tools must be a list. Got "add"'),
        (
            {"prompt": "a", "completion": [{**CHAT[1], "tool_calls": 5}]},
            "tool_calls must be a list. Got 5",
        ),
    ],
)
def test_a_record_that_is_no_conversation_is_refused(record, says):
    with pytest.raises(ConfigError) as caught:
        parse(record, where="chats.jsonl, line 7")
    assert says in str(caught.value)
    assert str(caught.value).startswith("chats.jsonl, line 7")


def test_what_tables_put_beside_the_messages_is_read_or_named(source, caplog):
    call = {"function": {"name": "f", "arguments": {"city": "Rome", "day": None}}}
    asked = {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (read,) = parse({**asked, "system": "Be short.", "tools": [{"name": "f", "x": None}]}, where="")
    assert read.messages[0] == {"role": "system", "content": "Be short."}
    assert read.messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert (read.tools, read.learned) == ([{"name": "f"}], (2,))
    caplog.set_level("INFO")
    source([{**chat(i), "functions": []} for i in range(9)]).prepare()
    assert "Keys of the lines that nothing reads: functions." in caplog.text


def test_an_answer_that_the_template_leaves_out_is_refused(source, tmp_path):
    """As the thoughts of all turns but the last, by many models' templates."""
    file = tmp_path / "last.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role + ':' }}{{ m.thinking if loop.last }}"
        "{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thinking": "hm"},
    ]
    source([{"messages": turns}] * 9, template=str(file)).prepare()
    with pytest.raises(ConfigError, match='leaves out thinking="hm" of message 2'):
        source([{"messages": turns * 2}] * 9, template=str(file)).prepare()
    turns[1]["weight"] = 0
    source([{"messages": turns + turns[:1] + CHAT[1:2]}] * 9, template=str(file)).prepare()


def test_bad_lines_are_named_together(source):
    with pytest.raises(ConfigError) as caught:
        source([chat(0), {"text": "a"}, chat(1), {"messages": [CHAT[0]]}]).prepare()
    assert len(caught.value.problems) == 2
    assert "line 2: neither" in caught.value.problems[0]
    assert "line 4: no message" in caught.value.problems[1]
    with pytest.raises(ConfigError, match="There may be more"):
        source([{f"key{i}": 1} for i in range(30)]).prepare()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"template": "alpaca"}, "data.source.template=alpaca cannot be read"),
        (
            {"vocab_size": 200},
            "the tokenizer of the model, or leave data.source.vocab_size out; for a model that "
            "begins",
        ),
    ],
)
def test_settings_that_cannot_be_right_are_refused(source, settings, says):
    with pytest.raises(ConfigError) as caught:
        source([{"messages": CHAT}], **settings).prepare()
    assert says in str(caught.value)


def test_the_run_directory_gets_what_reading_the_same_chats_needs(source, tmp_path):
    made = source([chat(i) for i in range(4)])
    run = tmp_path / "run"
    run.mkdir()
    data(made).save_assets(run)
    again = Conversations(
        made.path,
        tokenizer=str(run),
        context=64,
        val_fraction=0.0,
        cache_dir=str(tmp_path / "cache"),
    )
    assert again.chat_template == made.chat_template
    assert np.array_equal(again.arrays("train")["tokens"], made.arrays("train")["tokens"])


@pytest.fixture
def chat_run(tmp_path, tokenizer_folder) -> list[str]:
    path = write(tmp_path / "chats.jsonl", [chat(i, f"fine {i}") for i in range(30)])
    return [
        "data=chat",
        f"data.path={path}",
        f"data.source.tokenizer={tokenizer_folder}",
        "data.context=32",
        f"data.source.cache_dir={tmp_path / 'cache'}",
        "data.global_batch_size=4",
        "trainer.accelerator=cpu",
    ]


@pytest.mark.guarantee
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_on_chats_resumes_exactly_and_answers(chat_run, tmp_path):
    size = ["model.width=32", "model.layers=2", "model.heads=2", "callbacks=none"]
    words = [
        *chat_run,
        *size,
        "trainer.max_steps=12",
        "trainer.val_every_n_steps=6",
        f"run.root={tmp_path}",
    ]
    stopped = ("run.name=stopped", "trainer.max_steps=6")
    for more in (("run.name=straight",), stopped, stopped[:1]):
        running.call("train.py", *words, "scheduler=constant", *more, cwd=tmp_path)
    straight, stopped = (
        state.read_whole(sorted((tmp_path / name / "checkpoints").glob("step=*"))[-1])["state_dict"]
        for name in ("straight", "stopped")
    )
    assert all(torch.equal(straight[name], stopped[name]) for name in straight)
    words = (tmp_path / "straight", "--chat", "--prompt", "how 3", "--tokens", "8")
    code, answer = in_process.call("generate", *words)
    assert code == 0
    assert "<|im_" not in answer
    assert "how 3" not in answer
