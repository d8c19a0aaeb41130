"""Qwen3-MoE folders in and out: transformers' logits, the same tensors, also with experts on ranks
of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from armature.checkpoint import convert
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError
from armature.finetune import architecture, check, export, folder
from armature.finetune.export import read_decoder
from tests import needs
from tests.finetune import extras
from tests.finetune.mixture_reference import CONFIG, ids

REFERENCE = Path(__file__).with_name("mixture_reference.py")
QWEN = {**CONFIG, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
NEAR = 2e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs.extra("transformers")
    root = tmp_path_factory.mktemp("mixture")
    extras.command(REFERENCE, "make", root / "folder", root / "logits.safetensors")
    return root


def far(logits: torch.Tensor, file: Path) -> float:
    return float((logits - load_file(file)["logits"]).abs().max())


@pytest.mark.slow
def test_logits_are_transformers_own(made: Path) -> None:
    args = architecture.mixture_arguments(folder.config(made / "folder"), name="folder")
    assert check.weight_problems(made / "folder", args) == []
    with torch.no_grad():
        assert (
            far(read_decoder(made / "folder", context=48)(ids()), made / "logits.safetensors")
            <= NEAR
        )


@pytest.mark.slow
def test_an_exported_folder_is_bit_equal_to_the_one_it_came_from(
    made: Path, tmp_path: Path
) -> None:
    source, run = made / "folder", tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    model = read_decoder(source, context=48)
    weights = {f"{convert.MODEL}{key}": value.detach() for key, value in model.state_dict().items()}
    meta = {"global_step": 0, "torch": str(torch.__version__)}
    checkpoint = run / "checkpoints" / "step=000000"
    CheckpointWriter().save(checkpoint, weights, meta, entries={"step": 0, "strategy": "none"})
    args = architecture.mixture_arguments(folder.config(source), name="folder") | {"context": 48}
    cfg = configuration(args, run)
    line = export.export(cfg, checkpoint, tmp_path / "out", shard_bytes=60_000)
    assert "its logits are the run's" in line
    written, read = (all_tensors(path) for path in (tmp_path / "out", source))
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], value) for name, value in read.items())
    extras.command(REFERENCE, "logits", tmp_path / "out", tmp_path / "logits.safetensors")
    assert (
        far(load_file(made / "logits.safetensors")["logits"], tmp_path / "logits.safetensors")
        == 0.0
    )


def configuration(args: dict[str, Any], run: Path) -> Any:
    return OmegaConf.create(
        {
            "model": {"_target_": check.MIXTURE, "_partial_": True, **args},
            "task": {"_target_": "armature.tasks.language_modeling.LanguageModeling"},
            "optimizer": {"_target_": "armature.optim.adamw.adamw", "_partial_": True},
            "scheduler": None, "run": {"dir": str(run)},
        }
    )  # fmt: skip


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen3"},
            "model_type=qwen3 is no mixture of experts .* Type model=pretrained",
        ),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=.0. is not in the mixture"),
        ({"num_experts": None}, "it lacks num_experts"),
    ],
)
def test_what_the_mixture_does_not_have_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture.mixture_arguments(QWEN | changes, name="folder")
    assert architecture.mixture_arguments(QWEN, name="folder")["normalized"]


def test_a_decoder_does_not_read_a_mixture() -> None:
    with pytest.raises(
        ConfigError, match=r"is a mixture of experts\. Type model=pretrained_mixture"
    ):
        architecture.arguments(QWEN, name="folder")
