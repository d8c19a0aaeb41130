"""A run on weights of 4 bits by the command line: resumed, evaluated, asked, and written as
folders.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from armature import loading
from armature.checkpoint import convert
from armature.finetune import nf4
from tests.data.chat_parts import CHATS, folder, write
from tests.finetune.folders import write_random_model
from tests.finetune.test_lora_folders import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ALSO = [
    "callbacks=[ema,monitors]",
    "callbacks.monitors.norms_every_n_steps=1",
    "strategy.activation_checkpointing=every",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("qlora")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }
    write_random_model(path / "base", **sizes)
    folder(path / "base")
    write(path / "chats.jsonl", CHATS)
    return path


def words(root: Path, name: str, *more: str) -> list[str]:
    return [
        "train.py",
        "experiment=finetune_qlora",
        f"model.pretrained={root / 'base'}",
        f"data.path={root / 'chats.jsonl'}",
        "data.context=64",
        "data.global_batch_size=4",
        f"data.source.cache_dir={root / 'cache'}",
        "trainer.max_steps=6",
        "trainer.accelerator=cpu",
        "trainer.precision=bf16-mixed",
        "task.adapter.rank=4",
        "optimizer.lr=1e-2",
        f"run.root={root}",
        f"run.name={name}",
        "logger=none",
        "checkpoint.every_n_steps=3",
        "checkpoint.keep_last=3",
        *more,
    ]


@pytest.fixture(scope="module")
def run(root):
    command(*words(root, "run", *ALSO))
    return root / "run"


def test_a_run_of_4_bits_resumes_bit_for_bit(root, run):
    command(*words(root, "again", *ALSO, f"resume={run / 'checkpoints/step=000003'}"))
    last = [root / name / "checkpoints/step=000006" for name in ("run", "again")]
    straight, resumed = (convert.weights_of(checkpoint) for checkpoint in last)
    assert not [
        name for name in straight if name.endswith(nf4.PARTS)
    ]  # they are in the folder of the base model
    straight, resumed = (loading.load(checkpoint).state_dict() for checkpoint in last)
    assert straight.keys() == resumed.keys()
    assert [name for name in straight if name.endswith(nf4.PARTS)]
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_4_bits_are_not_exchanged_for_16_on_the_way(root, run):
    said = command(*words(root, "run", "task.adapter.quantize=null"), code=2)
    assert "was trained with other settings: task.adapter.quantize=nf4 there" in said


def test_a_run_of_4_bits_is_evaluated_and_answers(run):
    assert "val/loss" in command(
        "scripts/evaluate.py", run, "--split", "val", "--accelerator", "cpu"
    )
    asked = ["--chat", "--prompt", "how are 3", "--tokens", "6", "--accelerator", "cpu"]
    assert "<|im_" not in command("scripts/generate.py", run, *asked)


def test_folders_hold_the_quantized_weights_with_the_adapters_added(root, run):
    assert "14 adapters of rank 4" in command(
        "scripts/convert.py", run, root / "adapter", "--adapter"
    )
    said = command("scripts/convert.py", run, root / "merged", "--dtype", "bfloat16")
    assert "its logits are the run's" in said
    merged, base = (load_file(root / each / "model.safetensors") for each in ("merged", "base"))
    adapter = load_file(root / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
    expected = nf4.rounded(base[f"{name}.weight"]) + 8.0 * b @ a
    scale = expected.abs().max()
    assert (merged[f"{name}.weight"] - expected).abs().max() < 0.01 * scale
    assert (b @ a).abs().max() > 0.01 * scale
