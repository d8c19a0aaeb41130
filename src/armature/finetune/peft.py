"""Write a run's adapters as a folder that peft loads: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor

from armature import files
from armature.errors import ConfigError
from armature.finetune.export import Source, adapter_of, form_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def export(cfg: DictConfig, checkpoint: Path, target: Path, *, average: bool = False) -> str:
    """Write the folder and return what was written, as a line.

    Raises ConfigError for a run without adapters, or one that trained other weights as well, which the form lacks.
    """
    adapter = adapter_of(cfg)
    if adapter is None:
        raise ConfigError(f"{cfg.run.dir}: the run has no adapters (task.adapter). Leave --adapter out.")
    if adapter.train:
        raise ConfigError(
            f"{cfg.run.dir}: the run trained task.adapter.train={adapter.train} as well, which an adapter's folder "
            "does not hold. Leave --adapter out: the whole model is written."
        )
    source = Source(checkpoint, form_of(cfg).module_name, average=average, adapter=adapter)
    tensors: dict[str, Tensor] = {}
    for name in source.adapters:
        module = name.removesuffix(".weight")
        for part, value in zip(("lora_A", "lora_B"), source.read_adapter(name), strict=True):
            tensors[f"{_PREFIX}{module}.{part}.weight"] = value.contiguous()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
        "base_model_name_or_path": cfg.model.get("pretrained"), "target_modules": targets(source),
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout, "use_rslora": adapter.rslora,
    }  # fmt: skip
    with files.folder_beside(target) as beside:
        part = beside / target.name
        part.mkdir()
        files.replace(part / CONFIG, json.dumps(config, indent=2) + "\n")
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        files.sync(part / WEIGHTS)
        part.replace(target)
    size = sum(value.numel() for value in tensors.values())
    return f"{target}: {len(source.adapters)} adapters of rank {adapter.rank}, {size:,} parameters"


def targets(source: Source) -> list[str]:
    """Return which modules have adapters: the last parts of their names where all of that name have one."""
    adapted = {name.removesuffix(".weight") for name in source.adapters}
    every = {name.removesuffix(".weight") for name in source.names}
    last = {name.rpartition(".")[2] for name in adapted}
    alike = {name for name in every if name.rpartition(".")[2] in last}
    return sorted(last if alike == adapted else adapted)
