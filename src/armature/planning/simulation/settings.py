"""The configuration of a simulated run, and what is wrong with it on the machine that is simulated.

Torch-free.
"""

import tempfile
from typing import Any
from unittest.mock import patch

from omegaconf import DictConfig, ListConfig, OmegaConf

from armature import hardware
from armature.errors import ConfigError
from armature.finetune import check as pretrained
from armature.layout import Layout
from armature.planning.devices import Device
from armature.validation import checks


def problems(cfg: DictConfig, device: Device) -> list[str]:
    """Return what train.py would refuse on a machine with this device, the data apart; [] if
    nothing.
    """
    try:
        cfg = pretrained.fill(cfg.copy())
    except ConfigError as error:
        return error.problems
    if pretrained.is_of_others(cfg):
        return [
            f"model._target_={cfg.model._target_}: models that other libraries compute are neither "
            "simulated nor "
            "planned. For a folder of Llama, Mistral, Qwen2 or Qwen3 type model=pretrained: it "
            "costs nearly the same."
        ]
    count, root = cfg.trainer.devices, tempfile.gettempdir()
    too_many = device.too_many(count) if isinstance(count, int) else None
    problems = [too_many] if too_many else []
    try:
        layout = Layout.of(checked(cfg, device, root=root, prepare=False, open_data=False)[0])
    except ConfigError as error:
        return [*problems, *error.problems]
    if layout.kind == "deepspeed":
        problems.append(
            "strategy=deepspeed: its engine is not simulated. Type strategy=fsdp, or "
            "scripts/plan.py … --quick for ZeRO's formulas."
        )
    return problems


def checked(
    cfg: DictConfig, device: Device, *, root: str, **options: Any
) -> tuple[DictConfig, list[str]]:
    """Return the checked configuration as on a machine that has these GPUs, and what is left out
    of it that changes the result.

    `root`: of the run directory; `options`: of the check.
    """
    notes, count = simplify(cfg, root=root), cfg.trainer.devices
    cfg.trainer.accelerator = "gpu"
    with patch.multiple(
        hardware,
        gpu_count=lambda: count,
        compute_capability=lambda: device.capability,
        gpu_memory_bytes=lambda: device.memory_bytes,
    ):
        return checks.check(cfg, **options), notes


def experts_travel(layout: Layout) -> bool:
    """Return whether tokens travel to a mixture's experts on other ranks, so that their load
    matters.
    """
    return layout.kind == "mesh" and layout.options.get("expert", 1) > 1


def of_depth(cfg: DictConfig, layers: int) -> DictConfig:
    """Return the configuration of a model of so many layers.

    Raises ConfigError if it has no number of layers, or different windows.
    """
    cfg = pretrained.fill(cfg.copy())
    forget_folder(cfg)  # which has another number of layers
    if not isinstance(OmegaConf.select(cfg, "model.layers"), int):
        raise ConfigError(
            "--depths: the model has no number of layers (model.layers). Leave out --depths."
        )
    cfg.model.layers = layers
    if isinstance(windows := cfg.model.get("windows"), ListConfig):
        if len({*windows}) > 1:
            raise ConfigError(
                "--depths: model.windows differs between blocks, so a few say nothing of all. "
                "Leave --depths out."
            )
        cfg.model.windows = windows[:layers]
    return cfg


def forget_folder(cfg: DictConfig) -> None:
    """Leave out `model.pretrained`: sizes are in the configuration, and weights have no part in a
    step's cost.
    """
    if OmegaConf.select(cfg, "model.pretrained") is not None:
        # it may name the folder
        cfg.data = OmegaConf.create(OmegaConf.to_container(cfg.data, resolve=True))
        cfg.model.pretrained = None


def simplify(cfg: DictConfig, *, root: str) -> list[str]:
    """Leave out what has no part in a step; return what of it changes the result.

    `root`: of the run directory.
    """
    cfg.run.root, cfg.run.name, cfg.resume = root, "run", "never"
    forget_folder(cfg)
    cfg.logger, cfg.trainer.profile, cfg.checkpoint.root, cfg.run.report = {}, False, None, False
    notes = []
    if OmegaConf.select(cfg, "strategy.compile", default="none") != "none":
        notes.append(
            f"strategy.compile={cfg.strategy.compile} is simulated without: compiled blocks keep "
            "fewer activations and "
            "move less memory, so the peak is at most what is printed, and the run faster."
        )
        cfg.strategy.compile = "none"
    if OmegaConf.select(cfg, "model.document_token") is not None:
        notes.append(
            "model.document_token: FlexAttention is simulated as attention with a dense mask, "
            "which holds more memory."
        )
    if OmegaConf.select(cfg, "strategy.find_unused_parameters"):
        notes.append(
            "strategy.find_unused_parameters is simulated without: each backward reduces a number "
            "for each parameter on top."
        )
        cfg.strategy.find_unused_parameters = False
    if OmegaConf.select(cfg, "data.num_workers"):
        cfg.data.num_workers = 0
    return notes
