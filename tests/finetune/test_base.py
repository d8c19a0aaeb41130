"""Checkpoints of adapters: what is in them, and that their base model is found again, or missed by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from armature import config
from armature.checkpoint import directory, storage
from armature.errors import ConfigError
from armature.finetune import architecture, base, folder
from armature.finetune.lora import is_adapter
from benchmarks.parity.harness import LAYOUTS, Job, difference, fit, fit_once
from tests.finetune.folders import write_model

ADAPTER = {"rank": 4, "alpha": 8.0}
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def write_base(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a folder with random weights, in two files."""
    generator = torch.Generator().manual_seed(seed)
    write_model(path, **{**SIZES, **changes})
    for file in sorted(path.glob("*.safetensors")):
        tensors = {name: 0.2 * torch.randn(value.shape, generator=generator) for name, value in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture
def model(tmp_path):
    return write_base(tmp_path / "base")


def job(layout: str, path: Path, **options: Any) -> Job:
    args = architecture.arguments(folder.config(path), name=str(path))
    named = {**args, "context": 16, "pretrained": str(path)}
    return replace(LAYOUTS[layout], adapter=ADAPTER, model_args=named, **options)


# ---------------------------------------------------------------- to know a base model again
def test_a_copy_in_other_files_is_the_same_model(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / folder.CONFIG).write_bytes((model / folder.CONFIG).read_bytes())
    tensors = {name: value for file in model.glob("*.safetensors") for name, value in load_file(file).items()}
    save_file(dict(sorted(tensors.items())), copy / folder.WEIGHTS, metadata={"format": "pt"})
    assert base.record(copy) | {"folder": ""} == base.record(model) | {"folder": ""}


def test_another_fine_tune_of_the_same_form_is_another_model(model, tmp_path):
    other = base.record(write_base(tmp_path / "other", seed=1))
    assert other["fingerprint"] == base.record(model)["fingerprint"]
    assert other["values"] != base.record(model)["values"]


@pytest.mark.parametrize("place", [0, 5000, 24500])
def test_a_change_within_a_sample_of_one_tensor_is_seen(tmp_path, place):
    path = write_base(tmp_path / "base", vocab_size=200)  # the embedding has 25,600 bytes: not all are sampled
    before = base.record(path)
    tensor = folder.weights(path).tensors["model.embed_tokens.weight"]
    with (path / tensor.file).open("r+b") as file:
        file.seek(tensor.span[0] + place)
        file.write(b"\x01\x02\x03\x04")
    assert (base.record(path)["values"] == before["values"]) is (place == 5000)


def says(name: Path | str, needed: dict[str, str], checkpoint: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        base.found(str(name), needed, checkpoint)
    return " ".join(" ".join(caught.value.problems).split())


def test_what_is_not_the_base_model_is_named(model, tmp_path):
    checkpoint, needed = tmp_path / "run" / "checkpoints" / "step=000002", base.record(model)
    (tmp_path / "run").mkdir()
    folder.keep(model, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("".join(f"{group}: {{a: 1}}\n" for group in config.NEEDED))
    assert base.found(str(model), needed, checkpoint) == model

    told = says(tmp_path / "gone", needed, checkpoint)
    assert f"model.pretrained={tmp_path / 'gone'}: no such folder." in told
    assert f"Its base model was {model}. Type model.pretrained=FOLDER" in told

    assert "its weights have other values" in says(write_base(tmp_path / "a", seed=1), needed, checkpoint)
    told = says(write_base(tmp_path / "b", rope_theta=1e6), needed, checkpoint)
    assert "its config.json differs in rope_theta" in told
    assert f"Its weights are the same: type cp {tmp_path}/run/pretrained/config.json {tmp_path}/b/" in told
    assert "differs in num_hidden_layers" in says(write_base(tmp_path / "c", num_hidden_layers=2), needed, checkpoint)
    renamed = write_base(tmp_path / "d")
    file, *_ = sorted(renamed.glob("*.safetensors"))
    save_file({name: value.double() for name, value in load_file(file).items()}, file)
    assert "its tensors have other names, types or shapes" in says(renamed, needed, checkpoint)
    file.write_bytes(file.read_bytes()[:-8])
    assert f"{file}: truncated" in says(renamed, needed, checkpoint)


# ---------------------------------------------------------------- what checkpoints hold
def saved_names(checkpoint: Path) -> set[str]:
    return set(storage.read_metadata(checkpoint).state_dict_metadata)


CHAIN = [
    "single", "ddp 2", "fsdp 2", "hsdp 2×2", "tensor 2, sequence parallel", "pipeline 2, 1f1b", "fsdp 2 × tensor 2",
    "pipeline 2, zero bubble", "2×2×2", "deepspeed 2 at 2", "deepspeed 3 at 2", "single",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_layout_writes_what_is_trained_and_every_other_resumes_it(model, tmp_path):
    """Each resumes the checkpoint of the one before it, for a step."""
    whole = fit_once(job("single", model, steps=len(CHAIN)))
    last = None
    for step, layout in enumerate(CHAIN, start=1):
        here = tmp_path / f"step={step:06d}"
        run = fit(job(layout, model, steps=step, resume=last, save=str(here)))
        last = str(here)
        assert run.losses == pytest.approx(whole.losses[step - 1 : step], abs=1e-5), layout
        assert run.grad_norms == pytest.approx(whole.grad_norms[step - 1 : step], rel=1e-4), layout
        assert run.facts["trained"] == whole.facts["trained"], layout
        weights = {name for name in saved_names(here) if name.startswith("model.")}
        assert weights == whole.facts["trained"], layout
        assert all(map(is_adapter, weights))
        assert directory.read_manifest(here)["base"] == base.record(model), layout  # pyright: ignore[reportOptionalSubscript]
    far = difference(run, replace(whole, losses=whole.losses[-1:], grad_norms=whole.grad_norms[-1:]))
    assert far["weights"] <= 1e-5, far
