"""Runs of experiment=dpo through train.py: resumes, other ranks, evaluation and export."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from armature.checkpoint import state
from tests import running
from tests.data.chat_parts import folder
from tests.finetune.folders import CONFIG, shapes
from tests.lightning_habits.compare import differences
from tests.running import ROOT, environment, rows
from tests.tasks.preference_runs import VOCABULARY, write_pairs

pytestmark = pytest.mark.slow
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """A folder with a random model (base/), its tokenizer, and pairs.jsonl."""
    path = tmp_path_factory.mktemp("dpo")
    base = folder(path / "base")
    (base / "config.json").write_text(json.dumps(CONFIG | SIZES))
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=draw) * 0.2
        for name, shape in shapes(CONFIG | SIZES).items()
    }
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    write_pairs(path / "pairs.jsonl")
    return path


@pytest.fixture(scope="module")
def train(parts):
    def start(name: str, *words: str, ranks: int = 1) -> Path:
        overrides = [
            "experiment=dpo",
            f"model.pretrained={parts / 'base'}",
            f"data.path={parts / 'pairs.jsonl'}",
            "data.context=64",
            "data.multiple=16",
            "data.source.val_fraction=0.25",
            "data.global_batch_size=8",
            "data.eval_batch_size=4",
            f"data.source.cache_dir={parts / 'cache'}",
            "trainer.accelerator=cpu",
            "trainer.precision=32-true",
            "logger=none",
            "callbacks=none",
            "scheduler.final=1.0",
            "scheduler.warmup=0",
            "optimizer.lr=0.01",
            "optimizer.eps=1e-6",
            f"run.root={parts / 'runs'}",
            f"run.name={name}",
            "trainer.max_epochs=null",
            "trainer.max_steps=6",
            "trainer.val_every_n_steps=3",
            *([f"trainer.devices={ranks}"] if ranks > 1 else []),
            *words,
        ]
        words = [sys.executable, str(ROOT / "train.py"), *overrides]
        result = running.run(words, cwd=parts, env=environment(), ranks=ranks)
        assert result.returncode == 0, result.stderr[-4000:]
        (parts / "runs" / name / "screen.txt").write_text(result.stdout + result.stderr)
        return parts / "runs" / name

    return start


def weights(run: Path) -> dict[str, torch.Tensor]:
    return state.read_whole(max((run / "checkpoints").glob("step=*")))["state_dict"]


def equal(one: Path, other: Path) -> None:
    assert rows(one) == rows(other)
    ours, theirs = weights(one), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


OTHERS = {  # what changes no loss, and its ranks
    "ddp": (["strategy=ddp"], 2),
    "fsdp": (["strategy=fsdp"], 2),
    "tensor": (["strategy=tensor", "strategy.sequence_parallel=true"], 2),
    "fsdp-tensor": (["strategy=fsdp_tensor"], 4),
    "accumulated": (["data.micro_batch_size=2"], 1),
    "padded": (["data.multiple=null"], 1),
}
COPY = ["task.adapter=null", "optimizer.lr=1e-3"]  # a frozen copy of the model is the reference


@pytest.mark.parametrize(
    ("changes", "learned"), [([], 0.3), (COPY, 0.6)], ids=["adapters", "whole"]
)
@pytest.mark.parametrize("other", OTHERS)
def test_any_layout_learns_preferences_as_one_process_does(train, other, changes, learned):
    words, ranks = OTHERS[other]
    single, found = (
        train(f"{name}-{learned}", "trainer.max_steps=16", *more, *changes, ranks=n)
        for name, more, n in (("single", ["strategy=single"], 1), (other, words, ranks))
    )
    table = rows(single)
    assert float(table[0]["train/loss"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(table[-1]["train/loss"]) < learned
    assert not (far := differences(found, single)), far


def test_a_run_resumes_bit_for_bit_and_is_evaluated_and_exported(train, parts):
    straight, stopped = train("straight"), train("stopped", "trainer.max_steps=3")
    screen = (straight / "screen.txt").read_text()
    assert "reference: the model without its adapters" in screen
    assert "eval mode" not in screen
    table = rows(straight)
    assert float(table[0]["train/loss"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(table[-1]["train/reward_margin"]) > float(table[1]["train/reward_margin"]) > 0.0
    assert float(table[-1]["val/reward_accuracy"]) == 1.0
    assert train("stopped") == stopped
    equal(straight, stopped)
    other = parts / "other.jsonl"
    other.write_text((parts / "pairs.jsonl").read_text().replace("how", "you"))
    shown = running.script(
        "evaluate.py", str(straight), "--split", "val", f"data.path={other}", cwd=parts
    ).stdout
    assert "val/reward_margin" in shown
    exported = running.script(
        "convert.py", str(straight), str(parts / "adapter"), "--adapter", cwd=parts
    ).stdout
    assert "14 adapters of rank 16" in exported


def test_a_file_of_all_weights_leaves_out_the_reference(train, parts):
    run = train("whole", "task.adapter=null", "trainer.max_steps=1", "trainer.val_every_n_steps=1")
    running.script("convert.py", str(run), str(parts / "whole.safetensors"), cwd=parts)
    held = {name for name in weights(run) if name.startswith("model.")}
    assert held == {f"model.{name}" for name in load_file(parts / "whole.safetensors")}
