"""Preference data and a task that does not read them, settings of DPO, and layouts that it cannot
have: refused.
"""

import pytest

from armature.finetune.check import DECODER, LORA
from armature.layout import Layout
from armature.validation import combinations
from tests.data.chat_parts import folder, write
from tests.in_process import problems_of

PAIR = {"prompt": "how are you", "chosen": "I am fine", "rejected": "world"}


@pytest.fixture
def checked(tmp_path):
    tokenizer, path = folder(tmp_path / "tokenizer"), write(tmp_path / "pairs.jsonl", [PAIR])
    files = [f"data.path={path}", f"data.source.tokenizer={tokenizer}", "trainer.accelerator=cpu"]
    common = ["data=preference", "task=dpo", *files, f"run.root={tmp_path}"]
    return lambda *words: " ".join(problems_of(*common, *words))


@pytest.mark.parametrize(
    "words", [["task.loss=ipo"], ["strategy=fsdp_tensor", "trainer.devices=4"]]
)
def test_pairs_and_a_task_that_reads_them_are_accepted(checked, words):
    assert checked(*words) == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["strategy=pipeline", "trainer.devices=2", "model.tied=false"],
            "does not work with this strategy (pipeline)",
        ),
        (
            [
                "strategy=tensor",
                "trainer.devices=2",
                "strategy.sequence_parallel=true",
                "data.multiple=9",
            ],
            "does not divide data.multiple=9, so its positions cannot be sharded. Type "
            "strategy.sequence_parallel=false, or data.multiple=10",
        ),
        (
            ["strategy=deepspeed", "trainer.devices=2"],
            "does not work with this strategy (deepspeed): its losses",
        ),
        (
            ["data.multiple=0", "task.beta=0", "data.source.too_long=maybe"],
            "data.multiple=0: must be",
        ),
        (["task.beta=0"], "task.beta=0: must be a number above 0"),
    ],
)
def test_what_a_layout_or_the_data_cannot_have_is_refused_by_name(checked, words, says):
    assert says in " ".join(checked(*words).split())


def combined(cfg: dict) -> str:
    layout = Layout.resolve({"_target_": "armature.strategies.ddp.DDP"}, world_size=2)
    return "\n".join(combinations.problems(cfg, layout))


DPO, PAIRS = (
    "armature.tasks.direct_preference.DirectPreference",
    "armature.data.chat.data.PreferenceData",
)
CHAT, LANGUAGE = (
    "armature.data.chat.data.ChatData",
    "armature.tasks.language_modeling.LanguageModeling",
)


@pytest.mark.parametrize(
    ("task", "data", "says"),
    [
        (
            DPO,
            CHAT,
            "task=DirectPreference learns from pairs of answers, and data=ChatData gives none",
        ),
        (
            LANGUAGE,
            PAIRS,
            "data=PreferenceData gives pairs of answers, which task=LanguageModeling does not "
            "compare",
        ),
    ],
)
def test_pairs_without_their_task_and_the_other_way_round_are_refused(task, data, says):
    assert says in combined({"task": {"_target_": task}, "data": {"_target_": data}})
    assert combined({"task": {"_target_": LANGUAGE}, "data": {"_target_": CHAT}}) == ""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"adapter": {"_target_": LORA}, "label_smoothing": 0.1, "loss": "ipo"},
            "is of task.loss=sigmoid",
        ),
        (
            {"adapter": {"_target_": LORA, "quantize": "nf4"}},
            "task.adapter.quantize=nf4: preferences have not been compared",
        ),
        ({"adapter": None}, "reference is a copy of the model of a folder. Type model.pretrained="),
        (
            {"adapter": {"_target_": LORA, "train": ["embed"]}},
            "changes the model without its adapters",
        ),
    ],
)
def test_settings_that_cannot_be_right_are_refused(settings, says):
    cfg = {
        "task": {"_target_": DPO, **settings},
        "data": {"_target_": PAIRS},
        "model": {"_target_": DECODER},
    }
    assert says in combined(cfg)
