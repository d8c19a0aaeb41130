"""Folders of Hugging Face in and out: the same logits as transformers, the same tensors, under
every layout.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from armature.data import tokenizer
from armature.finetune import architecture, built, check, folder
from armature.finetune.export import read_decoder
from armature.models.decoder.model import Decoder
from tests import forked, needs, running
from tests.finetune import extras, reference
from tests.finetune.folders import read, tensors
from tests.finetune.reference import FAMILIES, ids

NEAR = 2e-5
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    needs.extra("transformers")
    root = tmp_path_factory.mktemp("folders")
    extras.call(reference.make, root)
    return root


@pytest.fixture(scope="module")
def expected(folders):
    return load_file(folders / "logits.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
def test_both_dialects_of_the_configuration_are_one_model(folders, expected, name):
    found = architecture.arguments(folder.config(folders / name), name=name)
    old = json.loads((folders / name / "old_config.json").read_text())
    assert architecture.arguments(old, name=name) == found
    with torch.device("meta"):
        model = Decoder(**found, context=8, pretrained=str(folders / name))
    assert built.weight_problems(model) == []


@pytest.mark.parametrize(
    ("ranks", "layouts"), [(1, [""]), (2, ["shard=2", "tensor=2"]), (4, ["shard=2,tensor=2"])]
)
def test_logits_are_transformers_own_under_every_layout(
    folders, expected, tmp_path, ranks, layouts
):
    out = tmp_path / "logits.safetensors"
    script = Path(__file__).with_name("read_under_layouts.py")
    command = [sys.executable, str(script), str(folders), str(out), *layouts]
    result = forked.shared().run(
        command, cwd=running.ROOT, env=running.environment(), timeout=200, ranks=ranks
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = load_file(out)
    assert len(found) == len(layouts) * len(FAMILIES)
    far = {
        key: float((logits - expected[key.split()[0]]).abs().max()) for key, logits in found.items()
    }
    assert max(far.values()) <= NEAR, far


def test_a_head_apart_from_a_tied_folder_starts_as_the_embedding(folders, expected):
    path = folders / "qwen3"
    args = architecture.arguments(folder.config(path), name="qwen3") | {"tied": False}
    model = read(Decoder, **args, context=48, pretrained=str(path))
    with torch.no_grad():
        assert float((model(ids()) - expected["qwen3"]).abs().max()) <= NEAR
    assert model.head.weight is not model.embed.weight


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return running.write_corpus(tmp_path_factory.mktemp("corpus"))


TRAIN = (
    "experiment=finetune",
    "data=text",
    "data.context=32",
    "data.global_batch_size=4",
    "data.micro_batch_size=2",
    "optimizer.lr=1e-4",
    "optimizer.eps=1e-6",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.limit_val_batches=1",
    "trainer.test_at_end=false",
    "logger=none",
)


def train(path: Path, corpus: Path, cwd: Path, *more: str, ranks: int = 1):
    return running.call(
        "train.py",
        *TRAIN,
        f"data.path={corpus}",
        f"model.pretrained={path}",
        f"data.source.cache_dir={cwd}/cache",
        *more,
        cwd=cwd,
        ranks=ranks,
    )


@pytest.mark.guarantee
def test_a_run_starts_from_the_folder_resumes_without_it_and_comes_back_out(
    folders, corpus, tmp_path
):
    """And transformers computes the run's logits from what comes out."""
    base = tmp_path / "base"
    shutil.copytree(folders / "qwen3", base)
    tokenizer.train(["how are you"], vocab_size=288).save(str(base / folder.TOKENIZER))
    (base / folder.CHAT_TEMPLATE).write_text("{{ messages }}")
    losses = {}
    for run, ranks, more in (
        ("single", 1, ["strategy=single"]),
        ("fsdp", 2, ["strategy=fsdp", "trainer.devices=2"]),
        ("tensor", 2, ["strategy=tensor", "trainer.devices=2"]),
    ):
        more += ["trainer.max_steps=2", f"run.name={run}"]
        train(base, corpus, tmp_path, *more, ranks=ranks)
        losses[run] = running.losses(tmp_path / "outputs" / run)
    assert losses["fsdp"] == pytest.approx(losses["single"], abs=1e-5)
    assert losses["tensor"] == pytest.approx(losses["single"], abs=1e-5)
    base.rename(tmp_path / "moved")
    more = ["trainer.max_steps=3", "run.name=single", "strategy=single"]
    assert "is not there any more" in train(base, corpus, tmp_path, *more).stderr
    out = tmp_path / "exported"
    converted = running.script("convert.py", "outputs/single", str(out), cwd=tmp_path)
    assert "its logits are the run's" in converted.stdout
    assert (out / folder.CHAT_TEMPLATE).read_text() == "{{ messages }}"
    assert (out / folder.TOKENIZER).read_bytes() == (
        tmp_path / "moved" / folder.TOKENIZER
    ).read_bytes()
    named = f"model.pretrained={tmp_path / 'moved'}"
    words = ("outputs/single", "--tokens", "1", named)
    result = running.script("generate.py", *words, cwd=tmp_path)
    assert "holds all weights of the model, so none is read from that folder" in result.stderr
    extras.call(reference.write_logits, out, tmp_path / "theirs.safetensors")
    with torch.no_grad():
        ours = read_decoder(out, context=48)(ids())
    assert float((ours - load_file(tmp_path / "theirs.safetensors")["logits"]).abs().max()) <= NEAR


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_folder_is_bit_equal_to_the_one_it_came_from(folders, tmp_path, name):
    """Through a run's checkpoint, in several files with an index."""
    from omegaconf import OmegaConf

    from armature.checkpoint import convert
    from armature.checkpoint.writer import CheckpointWriter
    from armature.finetune import export

    source, run = folders / name, tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    folder.keep(source, run)
    model = read_decoder(source, context=48)
    weights = {f"{convert.MODEL}{key}": value.detach() for key, value in model.state_dict().items()}
    meta = {"global_step": 0, "torch": str(torch.__version__)}
    checkpoint = run / "checkpoints" / "step=000000"
    CheckpointWriter().save(checkpoint, weights, meta, entries={"step": 0, "strategy": "none"})
    args = architecture.arguments(folder.config(source), name=name) | {"context": 48}
    factories = {"_target_": check.DECODER, "_partial_": True, **args}
    task = {"_target_": "armature.tasks.language_modeling.LanguageModeling"}
    optimizer = {"_target_": "armature.optim.adamw.adamw", "_partial_": True}
    cfg = OmegaConf.create(
        {
            "model": factories,
            "task": task,
            "optimizer": optimizer,
            "scheduler": None,
            "run": {"dir": str(run)},
        }
    )
    line = export.export(cfg, checkpoint, tmp_path / "out", shard_bytes=200_000)
    assert "its logits are the run's" in line
    found, there = tensors(tmp_path / "out"), tensors(source)
    assert found.keys() == there.keys()
    assert all(torch.equal(found[key], there[key]) for key in there)
    assert folder.weights(tmp_path / "out").problems == ()
    assert (tmp_path / "out" / folder.INDEX).is_file()
    assert {**folder.config(tmp_path / "out"), "torch_dtype": 0, "dtype": 0} == {
        **folder.config(source), "torch_dtype": 0, "dtype": 0,
    }  # fmt: skip
