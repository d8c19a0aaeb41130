"""Every shipped file in configs/ composes, passes the checks and builds what it names."""

import functools
import re
from pathlib import Path

import pytest
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from armature.data import feed
from armature.validation import checks
from armature.validation import compose as compose_module
from armature.validation.compose import explain
from armature.validation.composing import composing, instantiate
from scripts import reference
from tests.finetune.folders import write_model
from tests.sampled import sampled
from tests.shipped import is_shipped

CONFIGS = Path(__file__).parents[1] / "configs"
ALL = [path for path in filter(is_shipped, reference.files()) if path.stem[0] != "_"]  # no parts
# they need packages off the path of these tests (tests/finetune runs them), or that none installs
ELSEWHERE = {
    *("model/huggingface", "model/text_classifier", "model/timm", "task/text_classification"),
    *("experiment/finetune_classifier", "experiment/finetune_image"),
    *("logger/comet", "logger/mlflow"),
}
NAMES = {str(path.relative_to(CONFIGS).with_suffix("")) for path in ALL}
# the files of hardware/ are no part of a run: tests/planning/ reads them
FILES = sorted(name for name in NAMES - ELSEWHERE if not name.startswith("hardware/"))
EXPERIMENTS = [path for path in ALL if path.parent.name == "experiment"]
EXTRA = {  # what a file cannot do without
    "data/text": ["data.path=text/*.txt"],
    "data/chat": ["data.path=chats.jsonl"],
    "data/preference": ["data.path=pairs.jsonl", "task=dpo"],
    "task/dpo": ["data=preference", "data.path=pairs.jsonl"],
    "data/tokens": ["data.path=text"],
    "data/blend": ["data.paths={a: text}"],
    "data/hf": ["data.path=csv", "task=example", "model=example"],
    "data/table": ["data.path=t.csv", "data.target=y", "task=example", "model=example"],
    "data/image_folder": [
        "data.path=text",
        "task=image_classification",
        "model=vit_tiny",
        "model.channels=3",
        "model.image_size=64",
    ],
    "model/pretrained": ["model.pretrained=base"],
    "data/labeled_text": [
        "data.path=t.csv",
        "data.tokenizer=base",
        "task=example",
        "model=example",
    ],
    "experiment/finetune": ["model.pretrained=base", "data.path=chats.jsonl"],
    "experiment/finetune_lora": ["model.pretrained=base", "data.path=chats.jsonl"],
    "experiment/finetune_qlora": ["model.pretrained=base", "data.path=chats.jsonl"],
    "experiment/dpo": ["model.pretrained=base", "data.path=pairs.jsonl"],
    "experiment/gpt2_124m": ["data.path=text/*.txt"],
    "experiment/llama3_8b": ["data.path=text"],
    "experiment/llama3_70b": ["data.path=text"],
    "logger/wandb": ["logger.wandb.offline=true"],
    "model/vit_tiny": ["task=image_classification", "data=digits"],
    "task/image_classification": ["model=vit_tiny", "data=digits"],
    "data/digits": ["task=image_classification", "model=vit_tiny"],
    "model/example": ["task=example", "data=example"],
    "task/example": ["model=example", "data=example"],
    "data/example": ["task=example", "model=example"],
    "strategy/expert": ["trainer.devices=2", "model=mixture_nano"],
    "strategy/hsdp": ["trainer.devices=4"],
    "strategy/3d": ["trainer.devices=8", "model.tied=false"],
    "strategy/pipeline": ["trainer.devices=2", "model.tied=false"],
    "experiment/long_context": ["trainer.devices=1"],
    "strategy/fsdp_tensor": ["trainer.devices=4"],
    "strategy/fsdp_pipeline": ["trainer.devices=4", "model.tied=false"],
}


@pytest.fixture(autouse=True)
def _hydra(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").write_text(f"text number {i}, which says little. " * 400)
    write_model(
        tmp_path / "base", hidden_size=64, intermediate_size=64
    )  # whole blocks of 4-bit weights
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        checks, "_data_problems", lambda cfg, *, prepare: []
    )  # tests/data prepares for real
    with composing():
        yield
    GlobalHydra.instance().clear()


def composed(name: str) -> DictConfig:
    return compose_once(name).copy()


@functools.cache
def compose_once(name: str) -> DictConfig:
    group, option = name.split("/")
    override = (
        f"{group}='{option}'"  # quoted, as validation.quoting does it: debug=nan would be a number
    )
    devices = (
        ["trainer.devices=2"] if group == "strategy" and option not in ("single", "auto") else []
    )
    # strategy=auto refuses what this machine cannot hold; its choices are tested in tests/planning
    extra = [
        *EXTRA.get(name, devices),
        *(["strategy=single"] if group in ("model", "experiment") else []),
    ]
    return compose("train", overrides=["trainer.accelerator=cpu", override, *extra])


@pytest.mark.parametrize("name", sampled(FILES, 20))
def test_every_file_composes_and_passes_the_checks(name, monkeypatch):
    monkeypatch.setenv("USER", "someone")
    cfg = composed(name)
    if name == "local/example":
        assert cfg.run.root == "/scratch/someone/outputs"
        return
    assert checks.check(cfg).trainer.accelerator == "cpu"


@pytest.mark.parametrize(
    "name",
    sampled(
        [
            n
            for n in FILES
            if n.split("/")[0] in ("model", "optimizer", "scheduler", "task", "data", "logger")
        ],
        10,
    ),
)
def test_every_target_is_built(name, tmp_path):
    cfg = composed(name)
    cfg.run.name, cfg.run.dir = "run", str(tmp_path / "run")
    group = name.split("/")[0]
    if group == "task":
        parts = {key: instantiate(cfg[key]) for key in ("model", "optimizer", "scheduler")}
        assert instantiate(cfg.task, **parts).model is None  # built in configure_model
    elif group == "logger":
        assert all(instantiate(node) is not None for node in cfg.logger.values())
    elif group == "data":
        assert feed.build(cfg).global_batch_size
    else:
        assert callable(instantiate(cfg[group]))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_opens_with_its_command(path):
    head = path.read_text().splitlines()
    assert head[0] == "# @package _global_"
    assert head[1].startswith("# python train.py ")
    assert f"experiment={path.stem}" in head[1]


def test_a_key_of_other_options_names_them_all_also_those_that_inherit_it():
    (problem,) = explain(Exception(), ["strategy=ddp", "strategy.tensor=2"])
    axes = [
        "3d",
        "context",
        "expert",
        "fsdp",
        "fsdp_pipeline",
        "fsdp_tensor",
        "hsdp",
        "mesh",
        "pipeline",
        "tensor",
    ]
    named = re.findall(r"strategy=(\w+)", problem.partition("it belongs to")[2])
    assert [name for name in named if f"strategy/{name}" in NAMES] == axes
    (problem,) = explain(Exception(), ["strategy.stage=1"])
    assert "it belongs to strategy=deepspeed, " in problem


def test_a_misspelt_key_is_looked_for_without_composing_all_options():
    (problem,) = explain(Exception(), ["model.witdh=3"])
    assert "Did you mean 'model.width'?" in problem
    assert compose_module._composed.cache_info().misses < 4
