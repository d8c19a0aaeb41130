"""peft's folders: adapter_config.json and adapter_model.safetensors, written from a run and added to a decoder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from armature import files
from armature.errors import ConfigError
from armature.finetune import folder
from armature.finetune.export import Source, adapter_of, form_of, write_tokenizer
from armature.models.decoder.names import theirs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNREAD = (  # settings of peft's that change the result and are not read
    "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save", "rank_pattern",
    "trainable_token_indices", "use_dora", "use_qalora",
)  # fmt: skip


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
        write_tokenizer(folder.kept_in(Path(cfg.run.dir)), Path(cfg.run.dir), part)
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


def add_to(model: nn.Module, path: Path) -> None:
    """Add the adapters in a folder to a decoder's weights, in place. Each matrix must be whole.

    Raises ConfigError with everything that is unreadable, or does not belong to this model.
    """
    config = folder.read_json(path / CONFIG)
    problems = [f"{key}={config[key]}" for key in _UNREAD if config.get(key)]
    problems += [f"peft_type={config.get('peft_type')}"] * (config.get("peft_type") != "LORA")
    problems += [f"bias={config.get('bias')}"] * (config.get("bias") not in (None, "none"))
    rank, alpha = config.get("r"), config.get("lora_alpha")
    problems += [f"r={rank}"] * (not isinstance(rank, int) or rank < 1)
    problems += [f"lora_alpha={alpha}"] * (not isinstance(alpha, int | float))
    if problems:
        raise ConfigError(
            f"{path / CONFIG}: {', '.join(problems)}: only LoRA of plain form is read. Merge the adapter with peft "
            "(merge_and_unload), and name the folder of the result."
        )
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)  # pyright: ignore[reportArgumentType, reportOperatorIssue]
    weights = {str(theirs(name)): param for name, param in model.named_parameters() if theirs(name)}
    adapters = _read(path)
    if problems := _mismatches(adapters, weights, rank):  # pyright: ignore[reportArgumentType]
        raise ConfigError(f"{path}: adapter and base model do not belong together: {folder.some(problems)}.")
    with torch.no_grad():
        for name, (a, b) in adapters.items():
            change = scale * (b.float() @ a.float())
            weights[name].copy_(weights[name].float() + change.to(weights[name].device))


def _read(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by Hugging Face's names of the weights. Raises ConfigError for files that hold something else."""
    if not (path / WEIGHTS).is_file():
        raise ConfigError(f"{path / WEIGHTS}: this file is missing. Pickled adapters (.bin) are never loaded.")
    try:
        tensors = load_file(path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path / WEIGHTS}: it cannot be read ({error}). Copy it again.") from None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        module, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        parts.setdefault(f"{module}.weight", {})[part] = value
    if odd := [name for name, found in parts.items() if set(found) != {"lora_A", "lora_B"}] or [str(path)] * (
        not parts
    ):
        raise ConfigError(f"{path / WEIGHTS}: {folder.some(odd)}: no pair of lora_A and lora_B.")
    return {name: (found["lora_A"], found["lora_B"]) for name, found in parts.items()}


def _mismatches(adapters: dict[str, tuple[Tensor, Tensor]], weights: dict[str, Any], rank: int) -> list[str]:
    unknown = [f"the model has no {name}" for name in adapters if name not in weights]
    wrong = [
        f"{name} is {tuple(weights[name].shape)}, and its adapter {tuple(b.shape)} × {tuple(a.shape)} of rank {rank}"
        for name, (a, b) in adapters.items()
        if name in weights and ((b.shape[0], a.shape[1]) != weights[name].shape or {a.shape[0], b.shape[1]} != {rank})
    ]
    return unknown + wrong
