"""model=huggingface in the environment that has transformers: logits, layouts, and a run in and out
of a folder.
"""

import json
from pathlib import Path

import pytest

from armature.checkpoint.storage import read_metadata
from armature.finetune import folder
from armature.models.adapters import is_adapter
from tests import needs, running
from tests.data.chat_parts import CHATS, write
from tests.data.chat_parts import folder as write_tokenizer
from tests.finetune import extras, transformers_models
from tests.finetune.extras import command
from tests.finetune.folders import tensors
from tests.finetune.layouts import assert_equal
from tests.finetune.transformers_models import KINDS, RECURRENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
EVERY = [
    "ddp 2",
    "fsdp 2",
    "hsdp 2×2",
    "tensor 2",
    "fsdp 2 × tensor 2",
    "deepspeed 2 at 2",
    "deepspeed 3 at 2",
]
WITHOUT_TENSOR = ("gpt2",)  # transformers has no plan for it


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    needs.extra("transformers")
    root = tmp_path_factory.mktemp("models")
    extras.call(transformers_models.make, root)
    return root


def test_logits_are_transformers_own_alone_packed_and_with_a_cache(folders):
    far = extras.call(transformers_models.logits, folders)
    assert len(far) == 4 * len(KINDS) + 3 * len(RECURRENT)
    assert all(far[kind] == 0.0 for kind in (*KINDS, *RECURRENT)), far
    assert max(far.values()) <= 5e-5, far


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [*((kind, False) for kind in KINDS), ("llama", True), ("olmo2", True)],
)
def test_layouts_train_as_one_process_does(folders, kind, adapter):
    layouts = [name for name in EVERY if "tensor" not in name or kind not in WITHOUT_TENSOR]
    assert_equal(extras.call(transformers_models.fit, folders, kind, layouts, adapter), layouts)


def train(root: Path, *more: str, code: int = 0) -> str:
    path = write(root / "chats.jsonl", CHATS)
    words = [
        running.ROOT / "train.py",
        "experiment=finetune",
        "model=huggingface",
        f"model.pretrained={root / 'base'}",
        f"data.path={path}",
        "data.context=64",
        "data.global_batch_size=4",
        "data.micro_batch_size=2",
        f"data.source.cache_dir={root / 'cache'}",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.max_epochs=null",
        "trainer.log_every_n_steps=1",
        "trainer.val_every_n_steps=null",
        "optimizer.lr=1e-3",
        f"run.root={root}",
        "logger=none",
        "launch.max_restarts=0",
        "trainer.test_at_end=false",
    ]
    return command(*words, *more, code=code)


def assert_measured_as_at_the_end(run: Path) -> None:
    """evaluate.py prints what the run measured on its test split."""
    words = (run, "--split", "test", "--accelerator", "cpu")
    shown = command(running.ROOT / "scripts" / "evaluate.py", *words)
    found = dict(line.split() for line in shown.splitlines() if line.startswith("  test/"))
    measured = running.summary(run)["metrics"]
    assert {*found} == {"test/loss", "test/accuracy"}
    for name, value in found.items():
        assert float(value) == pytest.approx(measured[name], abs=1e-5), name


def test_a_run_resumes_without_its_folder_and_comes_back_out(folders, tmp_path):
    """Of a model whose files name its head otherwise than the code does."""
    base = tmp_path / "base"
    base.symlink_to(folders / "gpt_neox")
    write_tokenizer(base)
    layout = ["strategy=fsdp", "trainer.devices=2", "scheduler=constant"]
    train(tmp_path, "run.name=whole", *layout, "trainer.max_steps=4")
    run = ["run.name=run", *layout]
    train(tmp_path, *run, "trainer.max_steps=2")
    base.unlink()
    assert "is not there any more" in train(tmp_path, *run, "trainer.max_steps=4")
    assert running.losses(tmp_path / "run") == running.losses(tmp_path / "whole")  # bit for bit
    convert = running.ROOT / "scripts" / "convert.py"
    assert "its logits are the run's" in command(convert, tmp_path / "run", tmp_path / "out")
    ours, theirs = tensors(tmp_path / "out"), tensors(folders / "gpt_neox")
    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in theirs.items()
    }
    assert "embed_out.weight" in ours
    generate = [running.ROOT / "scripts" / "generate.py", tmp_path / "run", "--accelerator", "cpu"]
    command(*generate, "--chat", "--prompt", "how are 3", "--prompt", "how", "--tokens", "5")


def test_adapters_are_kept_alone_resume_generate_and_come_back_out(folders, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for file in (folders / "olmo2").iterdir():
        (base / file.name).symlink_to(file)
    write_tokenizer(base)
    more = [
        "task=lora",
        "task.preview_tokens=0",
        "task.adapter.rank=4",
        "scheduler=constant",
        "optimizer.lr=1e-2",
    ]
    train(tmp_path, "run.name=whole", *more, "trainer.max_steps=4")
    train(tmp_path, "run.name=run", *more, "trainer.max_steps=2")
    saved = [
        read_metadata(path).state_dict_metadata
        for path in (tmp_path / "run" / "checkpoints").glob("step=*")
    ]
    weights = [name for name in saved[0] if name.startswith("model.")]
    assert len(weights) == 2 * 3 * 7
    assert all(is_adapter(name) for name in weights)
    moved = tmp_path / "moved"
    base.rename(moved)
    assert "no folder that holds" in train(
        tmp_path, "run.name=run", *more, "trainer.max_steps=4", code=2
    )
    more.append(f"model.pretrained={moved}")
    assert "parameters are trained" in train(tmp_path, "run.name=run", *more, "trainer.max_steps=4")
    assert running.losses(tmp_path / "run") == running.losses(tmp_path / "whole")  # bit for bit
    scripts, run = running.ROOT / "scripts", tmp_path / "run"
    command(
        scripts / "generate.py",
        run,
        "--accelerator",
        "cpu",
        "--chat",
        "--prompt",
        "how",
        "--tokens",
        "5",
    )
    assert "21 adapters of rank 4" in command(
        scripts / "convert.py", run, tmp_path / "adapter", "--adapter"
    )
    assert "its logits are the run's" in command(scripts / "convert.py", run, tmp_path / "out")
    adapter, merged = tmp_path / "adapter", tmp_path / "out"
    assert extras.call(transformers_models.with_peft, moved, adapter, merged) <= 2e-5
    texts = extras.call(transformers_models.generated, run, merged)
    assert all(ours == theirs for ours, theirs in texts), texts


def test_what_does_not_fit_is_said_before_any_process_starts(folders, tmp_path):
    changed = {"hidden_size": 128, "num_hidden_layers": 2}
    base = tmp_path / "base"
    base.mkdir()
    for file in (folders / "llama").iterdir():
        (base / file.name).symlink_to(file)
    write_tokenizer(base)
    config = folder.config(base)
    (base / folder.CONFIG).unlink()
    (base / folder.CONFIG).write_text(json.dumps(config | changed))
    few = ["run.name=refused", "trainer.max_steps=1"]
    said = train(tmp_path, "strategy=ddp", "trainer.devices=2", *few, code=2)
    assert "LlamaForCausalLM has no such tensors" in said
    assert "lm_head.weight is (320, 64), not (320, 128)" in said
    (base / folder.CONFIG).write_text(
        json.dumps(config | {"model_type": "mine", "auto_map": {"AutoModel": "x.Y"}})
    )
    assert (
        "has no model_type=mine. Install a newer version: code in a folder is never run"
        in train(tmp_path, *few, code=2)
    )
    (base / folder.CONFIG).write_text(json.dumps(config | {"model_type": "vit"}))
    said = train(tmp_path, *few, code=2)
    assert "ViTConfig'> for this kind of AutoModel: AutoModelForCausalLM" in said
    assert not (tmp_path / "refused").exists()
