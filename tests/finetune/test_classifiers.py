"""Classifiers of texts that transformers computes: logits, layouts, a run in and out of a folder,
what is refused.
"""

import csv
import json
from pathlib import Path

import pytest

from tests import needs, running
from tests.data.chat_parts import folder as write_tokenizer
from tests.finetune import classifier_models, extras
from tests.finetune.classifier_models import KINDS
from tests.finetune.extras import command
from tests.finetune.layouts import assert_equal
from tests.finetune.test_huggingface_runs import EVERY, assert_measured_as_at_the_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WITH_PLAN = ("llama", "qwen3")  # transformers has none for the others
WORDS = {"fine": "thank you I am fine", "greeting": "hello world", "question": "how are you"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    needs.extra("transformers")
    root = tmp_path_factory.mktemp("classifiers")
    extras.call(classifier_models.make, root)
    for path in root.iterdir():
        write_tokenizer(path)
    return root


def test_logits_are_transformers_own_of_each_text_without_padding(folders):
    far = extras.call(classifier_models.logits, folders)
    assert {*far} == {*KINDS}
    assert max(far.values()) <= 2e-5, far


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [*((kind, False) for kind in KINDS), ("bert-words", True), ("llama", True)],
)
def test_layouts_train_as_one_process_does(folders, kind, adapter):
    layouts = [name for name in EVERY if "tensor" not in name or kind in WITH_PLAN]
    assert_equal(extras.call(classifier_models.fit, folders, kind, layouts, adapter), layouts)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["label", "text"])
        for i in range(90):
            label = [*WORDS][i % 3]
            rows.writerow([label, f"{WORDS[label]} {i % 7}" + " world" * (i % 5)])
    return path


def train(
    root: Path, base: Path, texts: Path, *more: str, code: int = 0, classes: int | None = 3
) -> str:
    return command(
        running.ROOT / "train.py",
        "experiment=finetune_classifier",
        f"model.pretrained={base}",
        *([f"model.classes={classes}"] if classes else []),
        f"data.path={texts}",
        "data.context=32",
        "data.global_batch_size=8",
        "data.micro_batch_size=4",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.max_epochs=null",
        "optimizer.lr=1e-3",
        "trainer.log_every_n_steps=1",
        "trainer.val_every_n_steps=null",
        "scheduler=constant",
        "scheduler.warmup=0",
        f"run.root={root}",
        "logger=none",
        "launch.max_restarts=0",
        *more,
        code=code,
    )


def test_a_run_resumes_is_evaluated_predicts_and_comes_back_out(folders, texts, tmp_path):
    base = tmp_path / "base"
    base.symlink_to(folders / "bert-words")
    layout = ["strategy=fsdp", "trainer.devices=2"]
    said = train(tmp_path, base, texts, "run.name=whole", *layout, "trainer.max_steps=16")
    assert "classifier.weight" in said
    assert "begin at random" in said
    train(tmp_path, base, texts, "run.name=run", *layout, "trainer.max_steps=5")
    base.unlink()
    assert "is not there any more" in train(
        tmp_path, base, texts, "run.name=run", *layout, "trainer.max_steps=16"
    )
    assert running.losses(tmp_path / "run") == running.losses(tmp_path / "whole")  # bit for bit
    scripts, run = running.ROOT / "scripts", tmp_path / "run"
    assert running.summary(run)["metrics"]["val/accuracy"] > 0.5
    assert_measured_as_at_the_end(run)
    new = tmp_path / "new.jsonl"  # without labels, and of two classes only
    new.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*WORDS.values()][1:]))
    out = tmp_path / "predictions.csv"
    command(scripts / "predict.py", run, f"data.path={new}", f"out={out}", "--accelerator", "cpu")
    rows = list(csv.DictReader(out.open()))
    assert [row["text"] for row in rows] == [*WORDS.values()][1:]
    assert {row["class"] for row in rows} <= {*WORDS}
    assert "its logits are the run's" in command(scripts / "convert.py", run, tmp_path / "out")


def test_what_does_not_fit_is_said_before_any_process_starts(folders, texts, tmp_path):
    def said(base: str, *more: str) -> str:
        return train(
            tmp_path,
            folders / base,
            texts,
            "run.name=refused",
            "trainer.max_steps=1",
            *more,
            code=2,
        )

    several = ["strategy=ddp", "trainer.devices=2"]
    found = said("bert", "model.classes=5", *several)
    assert "model.classes=5, but the head of" in found
    assert "Type model.classes=3, or model.new_head=true" in found
    found = said("roberta", "data.context=65")
    assert "has positions for 64 tokens: type data.context=64 or less" in found
    found = said("bert", "strategy=tensor", "trainer.devices=2")
    assert "transformers has no plan for it. Type strategy=fsdp" in found
    adapter = "{_target_: armature.finetune.lora.Lora, rank: 4, train: [classifier]}"
    found = said("bert-words", f"task.adapter={adapter}")
    assert (
        "begin at random, and would stay so. Type task.adapter.train=[classifier,bert.pooler.dense]"
        in found
    )
    assert "there is no key 'model.classes' here: it belongs to model=example, model=" in said(
        "bert", "model=huggingface"
    )
    found = train(
        tmp_path,
        folders / "llama",
        texts,
        "run.name=refused",
        "model=huggingface",
        code=2,
        classes=None,
    )
    assert "trains on labeled texts, but model=CausalLM takes tokens" in found
    assert not (tmp_path / "refused").exists()


def test_adapters_and_a_new_head_are_kept_alone_and_resume(folders, texts, tmp_path):
    adapter = "task.adapter={_target_: armature.finetune.lora.Lora, rank: 4, train: [classifier]}"
    more = [adapter, "model.new_head=true", "optimizer.lr=1e-2"]
    train(tmp_path, folders / "bert", texts, "run.name=whole", *more, "trainer.max_steps=6")
    train(tmp_path, folders / "bert", texts, "run.name=run", *more, "trainer.max_steps=3")
    said = train(tmp_path, folders / "bert", texts, "run.name=run", *more, "trainer.max_steps=6")
    assert "parameters are trained" in said
    assert running.losses(tmp_path / "run") == running.losses(tmp_path / "whole")
    assert_measured_as_at_the_end(tmp_path / "run")
