"""Adapters of a model from Hugging Face, trained by the command line, and what peft and
transformers make of them.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import needs, running
from tests.data.chat_parts import CHATS, folder, write
from tests.finetune import extras

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
MAKE = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(1)
config = AutoConfig.for_model(
    "qwen3", vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    initializer_range=0.2, tie_word_embeddings=True,
)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
"""
LOGITS = """
import sys, torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
base, adapter, merged, out = sys.argv[1:]
ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
with torch.no_grad():
    found = {"base": load(base)(ids).logits, "merged": load(merged)(ids).logits}
    found["adapter"] = PeftModel.from_pretrained(load(base), adapter).eval()(ids).logits
save_file({name: value.clone() for name, value in found.items()}, out)
"""


def command(file: str, *words: str | Path, code: int = 0) -> str:
    result = running.call(file, *words, cwd=running.ROOT, code=code)
    return result.stderr if code else result.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that trained adapters under fsdp 2 of a folder that has since moved."""
    needs.extra("transformers")
    root = tmp_path_factory.mktemp("adapters")
    extras.command("-c", MAKE, root / "base")
    folder(root / "base")
    path = write(root / "chats.jsonl", CHATS)
    words = [
        "experiment=finetune_lora",
        f"model.pretrained={root / 'base'}",
        f"data.path={path}",
        "data.context=64",
        "data.global_batch_size=4",
        f"data.source.cache_dir={root / 'cache'}",
        "trainer.max_steps=6",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "task.adapter.rank=4",
        "optimizer.lr=1e-2",
        f"run.root={root}",
        "run.name=run",
        "logger=none",
        "strategy=fsdp",
        "trainer.devices=2",
    ]
    command("train.py", *words)
    (root / "base").rename(root / "moved")
    convert = "scripts/convert.py"
    assert "14 adapters of rank 4" in command(convert, root / "run", root / "adapter", "--adapter")
    merge = [convert, root / "run", root / "merged"]
    assert f"Its base model was {root / 'base'}. Type" in command(*merge, code=2)
    assert "its logits are the run's" in command(*merge, moved(root))
    return root


def moved(root: Path) -> str:
    return f"model.pretrained={root / 'moved'}"


def test_peft_and_transformers_compute_what_was_trained(trained):
    out = trained / "logits.safetensors"
    extras.command("-c", LOGITS, trained / "moved", trained / "adapter", trained / "merged", out)
    logits = load_file(out)
    torch.testing.assert_close(logits["adapter"], logits["merged"], atol=2e-5, rtol=2e-5)
    assert (logits["adapter"] - logits["base"]).abs().max() > 0.1
    config = json.loads((trained / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 32.0, False)
    assert "model.layers.0.self_attn.q_proj" in config["target_modules"]


def test_a_run_whose_folder_has_moved_answers_and_is_evaluated(trained):
    run = [trained / "run", moved(trained), "--accelerator", "cpu"]
    asked = ["--chat", "--prompt", "how are 3", "--tokens", "6"]
    assert "<|im_" not in command("scripts/generate.py", *run, *asked)
    assert "val/loss" in command("scripts/evaluate.py", *run, "--split", "val")
    assert "Try --split val" in command("scripts/evaluate.py", *run, code=2)
