"""Checkpoints of adapters: what is in them, and that their base model is found again, or missed by
name.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from armature.checkpoint import directory, storage
from armature.errors import ConfigError
from armature.finetune import architecture, base, check, folder
from armature.finetune.lora import Lora
from armature.layout import Layout
from armature.models.adapters import is_adapter
from armature.models.decoder.model import Decoder
from armature.models.decoder.plan import PLAN
from armature.parallel import plan_check
from armature.strategies.single import SingleDevice
from tests.finetune.folders import write_random_model
from tests.support.parity.harness import LAYOUTS, Job, difference, fit, fit_once

ADAPTER = {"rank": 4, "alpha": 8.0}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_base(path: Path, **changes: Any) -> Path:
    return write_random_model(path, **{**SIZES, **changes})


@pytest.fixture
def model(tmp_path):
    return write_base(tmp_path / "base")


def job(layout: str, path: Path, **options: Any) -> Job:
    args = architecture.arguments(folder.config(path), name=str(path))
    named = {**args, "context": 16, "pretrained": str(path)}
    return replace(LAYOUTS[layout], adapter=ADAPTER, model_args=named, **options)


def says(name: Path | str, needed: dict[str, str], checkpoint: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        base.found(str(name), needed, checkpoint)
    return " ".join(" ".join(caught.value.problems).split())


def test_what_is_not_the_base_model_is_named(model, tmp_path):
    checkpoint, needed = tmp_path / "run" / "checkpoints" / "step=000002", base.record(model)
    assert base.found(str(model), needed, checkpoint) == model

    told = says(tmp_path / "gone", needed, checkpoint)
    assert f"model.pretrained={tmp_path / 'gone'}: no folder that holds" in told
    assert f"Its base model was {model}. Type model.pretrained=FOLDER" in told

    for other in (write_base(tmp_path / "a", seed=2), write_base(tmp_path / "b", rope_theta=1e6)):
        assert "is another model: its config.json or its weights" in says(other, needed, checkpoint)
    damaged = write_base(tmp_path / "d")
    file, *_ = sorted(damaged.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    assert f"{file}: missing, truncated" in says(damaged, needed, checkpoint)


# ---------------------------------------------------------------- what checkpoints hold
def saved_names(checkpoint: Path) -> set[str]:
    return set(storage.read_metadata(checkpoint).state_dict_metadata)


CHAIN = [
    "single",
    "ddp 2",
    "fsdp 2",
    "hsdp 2×2",
    "tensor 2",
    "tensor 2, sequence parallel",
    "pipeline 2, 1f1b",
    "fsdp 2 × tensor 2",
    "pipeline 2, zero bubble",
    "2×2×2",
    "deepspeed 2 at 2",
    "deepspeed 3 at 2",
    "single",
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_layout_writes_what_is_trained_and_every_other_resumes_it(model, tmp_path):
    """Each resumes the checkpoint of the one before it, for a step."""
    whole = fit_once(job("single", model, steps=len(CHAIN)))
    last, run = None, whole
    for step, layout in enumerate(CHAIN, start=1):
        here = tmp_path / f"step={step:06d}"
        averaged = {"ema": 0.9} if layout == "fsdp 2" else {}
        run = fit(job(layout, model, steps=step, resume=last, save=str(here), **averaged))
        last = str(here)
        assert run.losses == pytest.approx(whole.losses[step - 1 : step], abs=1e-5), layout
        assert run.grad_norms == pytest.approx(whole.grad_norms[step - 1 : step], rel=1e-4), layout
        assert run.facts["trained"] == whole.facts["trained"], layout
        names, trained = saved_names(here), whole.facts["trained"]
        assert {name for name in names if name.startswith("model.")} == trained, layout
        assert all(map(is_adapter, trained))
        of_optimizer = tuple(f".optimizer_states.0.{name}." for name in trained)
        others = {name for name in names - trained if not name.startswith(of_optimizer)}
        assert others == {f".extra.ema.{name}" for name in trained if averaged}, layout
        assert directory.read_manifest(here)["base"] == base.record(model), layout  # pyright: ignore[reportOptionalSubscript]
    far = difference(
        run, replace(whole, losses=whole.losses[-1:], grad_norms=whole.grad_norms[-1:])
    )
    assert far["weights"] <= 1e-5, far


class Frozen(L.LightningModule):
    """Three weights, of which the first is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen, self.unfrozen = (
            nn.Parameter(torch.ones(2) * i) for i in (1, 2, 3)
        )
        self.frozen.requires_grad_(False)
        self.unfrozen.requires_grad_(False)
        self.adapter = Lora()


def test_a_base_weight_that_was_trained_for_a_while_is_saved():
    module, strategy = Frozen(), SingleDevice()
    strategy._lightning_module = module
    strategy.frozen_base = {"frozen", "unfrozen"}
    assert strategy.unchanged_base() == set()  # the checkpoints are to hold all
    strategy.base = {"folder": "base", "fingerprint": ""}
    optimizer = torch.optim.AdamW(module.parameters())
    strategy.optimizers = [optimizer]
    assert strategy.unchanged_base() == set()  # no state tells yet what it steps
    module.trained.grad = torch.ones(2)
    optimizer.step()
    assert strategy.unchanged_base() == {"frozen", "unfrozen"}
    module.unfrozen.requires_grad_(True)
    assert strategy.unchanged_base() == {"frozen"}
    module.unfrozen.grad = torch.ones(2)
    optimizer.step()
    module.unfrozen.requires_grad_(False)
    assert strategy.unchanged_base() == {"frozen"}


# ---------------------------------------------------------------- before launch
def run_config(path: Path, **changes: Any) -> Any:
    node = {"_target_": check.DECODER, "_partial_": True, "pretrained": str(path), "context": 64}
    keys = {
        "model": node,
        "task": {"adapter": {"_target_": check.LORA, **ADAPTER}},
        "data": {},
        "checkpoint": {"include_base": False, "root": None},
        "run": {"root": str(path.parent), "name": "run", "dir": str(path.parent / "run")},
        "resume": "auto",
    }
    return OmegaConf.create({**keys, **changes})


def write_checkpoint(path: Path, entries: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    for name in (directory.META, directory.TENSOR_INDEX):
        (path / name).write_bytes(b"x")
    directory.write_manifest(
        path, directory.describe(path, [directory.META, directory.TENSOR_INDEX]), entries
    )
    return path


def test_what_checkpoints_leave_out_follows_from_where_the_weights_come_from(model, tmp_path):
    cfg = run_config(model)
    assert check.left_out(cfg, None) == base.record(model)
    assert check.left_out(run_config(model, task={"adapter": None}), None) is None
    assert check.left_out(run_config(model, checkpoint={"include_base": True}), None) is None
    whole = write_checkpoint(tmp_path / "run" / "checkpoints" / "step=000001", {"step": 1})
    assert check.left_out(cfg, whole) is None
    adapters = write_checkpoint(
        tmp_path / "run" / "checkpoints" / "step=000002", {"base": base.record(model)}
    )
    assert check.left_out(cfg, adapters) == base.record(model)
    with pytest.raises(ConfigError, match="other values"):
        check.left_out(run_config(write_base(tmp_path / "other", seed=2)), adapters)


def test_a_resume_needs_the_base_model_of_its_checkpoint(model, tmp_path):
    checkpoint = write_checkpoint(
        tmp_path / "run" / "checkpoints" / "step=000002", {"base": base.record(model)}
    )
    folder.keep(model, tmp_path / "run")
    assert check.fill(run_config(model)).model.width == 32
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError, match=f"no folder that holds.*\n{checkpoint} holds only what was trained"
    ):
        check.fill(run_config(model))  # not the run's copy, which has no weights
    assert check.fill(run_config(moved)).model.pretrained == str(moved)
    elsewhere = {"root": str(tmp_path / "runs"), "name": "b"}
    other = write_base(tmp_path / "other", seed=2)
    with pytest.raises(ConfigError, match="other values"):
        check.fill(run_config(other, run=elsewhere, resume=str(checkpoint)))
    assert check.fill(run_config(other, run=elsewhere)).model.width == 32  # a new run


def built(layout: dict[str, Any], world_size: int, model: Path, **adapter: Any) -> str:
    args = architecture.arguments(folder.config(model), name="base")
    strategy = {"_target_": "armature.strategies.mesh.MeshStrategy", **layout}
    found = plan_check.adapter_problems(
        partial(Decoder, **args, context=16),
        Lora(**adapter),
        Layout.resolve(strategy, world_size=world_size, plan=PLAN),
    )
    return " ".join(found)


def test_adapters_that_do_not_fit_the_model_are_named_before_launch(model):
    assert built({}, 1, model) == ""
    assert "no Linear matches query. There are: blocks.*.attention.q" in built(
        {}, 1, model, targets=["query"]
    )
    assert "no parameter matches wte. There are: embed.weight" in built({}, 1, model, train=["wte"])
    assert "task.adapter trains nothing" in built({}, 1, model, targets=[])
    assert "task.adapter.rank=1000: no adapted Linear has a rank above " in built(
        {}, 1, model, rank=1000
    )
    assert built({"pipe": 2, "schedule": "1f1b"}, 2, model) == ""
