"""Preferences: the forms that are read, what is refused or left out, batches of whole pairs."""

from functools import partial

import pytest
import torch

from armature.data.chat.conversations import parse_pair as parse
from armature.data.chat.data import PreferenceData
from armature.data.chat.source import Preferences
from armature.errors import ConfigError
from armature.models.loss import IGNORED
from tests.data.chat_parts import small_tokenizer

USER, GOOD, BAD = (
    {"role": role, "content": content}
    for role, content in (
        ("user", "how are you"),
        ("assistant", "I am fine"),
        ("assistant", "world"),
    )
)
SYSTEM = {"role": "system", "content": "hello"}


def record(i: int, chosen: str = "I am fine", rejected: str = "world") -> dict:
    return {"prompt": f"how {i}", "chosen": chosen, "rejected": rejected}


@pytest.fixture
def source(source_of):
    return partial(source_of, Preferences, "pairs.jsonl")


def data(source: Preferences, **settings) -> PreferenceData:
    return PreferenceData(source, context=source.context, **{"multiple": 8, **settings})


def texts(ids: torch.Tensor) -> list[str]:
    return [
        small_tokenizer().decode(row.tolist(), skip_special_tokens=False)
        for row in ids.flatten(0, -2)
    ]


@pytest.mark.parametrize(
    "written",
    [
        {"prompt": "how are you", "chosen": "I am fine", "rejected": "world"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [USER], "chosen": "I am fine", "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        # as HuggingFaceH4/ultrafeedback_binarized: whole conversations, and the prompt and the
        # chosen one once more
        {
            "prompt": "how are you",
            "messages": [USER, GOOD],
            "chosen": [USER, GOOD],
            "rejected": [USER, BAD],
        },
    ],
)
def test_every_form_of_a_pair_is_the_same_pair(written):
    chosen, rejected = parse(written, where="x")
    assert chosen.messages == [USER, GOOD]
    assert rejected.messages == [USER, BAD]
    assert chosen.learned == rejected.learned == (1,)
    assert chosen.place == rejected.place


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "no rejected (there: chosen, prompt)"),
        ({"prompt": "a"}, "no chosen and no rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "no rejected"),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        (
            {"prompt": 5, "chosen": "a", "rejected": "b"},
            "prompt must be a text or a list of messages. Got 5",
        ),
        (
            {"prompt": "a", "chosen": [{"role": "assistant"}], "rejected": "b"},
            "content must be text",
        ),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, "answers to different prompts"),
        (
            {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, GOOD]},
            "chosen begins with a message of the role user",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER]},
            "rejected: no message of the role assistant",
        ),
    ],
)
def test_a_bad_line_is_refused_with_its_number(source, written, says):
    with pytest.raises(ConfigError) as caught:
        source([record(0), written]).prepare()
    assert says in str(caught.value)
    assert "line 2" in str(caught.value)


def test_a_batch_holds_both_answers_of_each_pair_and_scores_the_answers_alone(source):
    pairs = data(source([record(0), record(1, "I am fine " * 3), record(2)])).dataset("train")
    batch = pairs.batch([0, 2])
    assert (
        batch["inputs"].shape == batch["targets"].shape == (2, 2, 24)
    )  # the longest, in multiples of 8
    assert pairs.batch([0, 1])["inputs"].shape == (2, 2, 32)
    answers = [small_tokenizer().decode(row[row != IGNORED].tolist(), skip_special_tokens=False)
               for row in batch["targets"].flatten(0, 1)]  # fmt: skip
    assert answers == ["I am fine<|im_end|>", "world<|im_end|>"] * 2
    assert ["how 0" in text for text in texts(batch["inputs"])] == [True, True, False, False]
    kept = batch["targets"][..., :-1] != IGNORED
    assert torch.equal(batch["targets"][..., :-1][kept], batch["inputs"][..., 1:][kept])
    one = pairs[1]
    assert one["inputs"].shape == (2, 32)
    fixed = data(source([record(0), record(2)]), multiple=None).dataset("train")
    assert fixed.batch([0])["inputs"].shape == (1, 2, 64)


def test_what_is_cut_or_left_out_is_counted_and_said(source, caplog):
    caplog.set_level("INFO")
    records = [
        record(0),
        record(1, "I am fine " * 40),
        record(2, rejected="I am fine"),
        record(3, chosen=""),
        {**record(4), "prompt": "how " * 90},
        record(5, "you " * 60, "you " * 70),
    ]
    made = source(records, template="plain")
    made.prepare()
    counts = made.header["splits"]["train"]
    expected = {
        "rows": 3,
        "cut": 1,
        "dropped": 3,
        "read": 6,
    }
    assert {key: counts[key] for key in expected} == expected
    assert "1 cut to the context. 3 left out: too long, without an answer" in caplog.text
    dropped = source(records, template="plain", too_long="drop").header["splits"]["train"]
    assert (dropped["rows"], dropped["dropped"]) == (2, 4)


def test_all_pairs_of_a_prompt_are_in_one_split(source):
    records = [record(i, rejected=f"world {k}") for i in range(40) for k in range(3)]
    made = source(records, val_fraction=0.4)
    found = {}
    for split in ("train", "val"):
        pairs = data(made).dataset(split)
        found[split] = {
            text.split("how ")[1].split("<")[0]
            for text in texts(pairs.batch(list(range(len(pairs))))["inputs"])
        }
    assert not found["train"] & found["val"]
    assert len(found["train"] | found["val"]) == 40
    assert made.header["splits"]["train"]["rows"] == 3 * len(found["train"])
