"""peft's folders: adapter_config.json and adapter_model.safetensors, written from a run and added
to a decoder.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from armature import files
from armature.errors import ConfigError
from armature.finetune import base, folder, others
from armature.finetune.export import Source, adapter_of, form_of, write_tokenizer
from armature.finetune.lora import Lora, merged
from armature.models.decoder.names import theirs
from armature.models.wrapped import WrappedModel, module_name

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NORMS = "lora_magnitude_vector"
_KNOWN = {  # settings of peft's that are read, or that do not change what a trained adapter adds
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
}
# with others peft changes the base's weights
_INITIALIZED = (None, True, False, "gaussian", "eva", "orthogonal")


def export(cfg: DictConfig, checkpoint: Path, target: Path, *, average: bool = False) -> str:
    """Write the folder, read it back, and return what was written, as a line.

    Raises ConfigError for a run without adapters, or one that trained other weights as well, which
    the form lacks.
    """
    adapter = adapter_of(cfg)
    if adapter is None:
        raise ConfigError(
            f"{cfg.run.dir}: the run has no adapters (task.adapter). Leave --adapter out."
        )
    if adapter.train:
        raise ConfigError(
            f"{cfg.run.dir}: the run trained task.adapter.train={adapter.train} as well, which an "
            "adapter's folder "
            "does not hold. Leave --adapter out: the whole model is written."
        )
    form = form_of(cfg)
    source = Source(
        checkpoint, form.module_name, average=average, adapter=adapter, shapes=form.shapes
    )
    if adapter.dora:
        source.add_base(cfg)
    tensors: dict[str, Tensor] = {}
    for name in source.adapters:
        module = _PREFIX + name.removesuffix(".weight")
        a, b, *_ = source.read_adapter(name)
        tensors |= {
            f"{module}.lora_A.weight": a.contiguous(),
            f"{module}.lora_B.weight": b.contiguous(),
        }
        if adapter.dora:
            tensors[f"{module}.{_NORMS}"] = source.read_norms(name)
    config = {
        "peft_type": "LORA",
        "task_type": task_type(cfg),
        "inference_mode": True,
        "bias": "none",
        "base_model_name_or_path": base.name_of(cfg, checkpoint),
        "target_modules": targets(source),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
    }
    with files.folder_beside(target) as beside:
        part = beside / target.name
        part.mkdir()
        files.replace(part / CONFIG, json.dumps(config, indent=2) + "\n")
        of_base = base.recorded(checkpoint)
        metadata = {"format": "pt"} | ({base.KEY: json.dumps(of_base)} if of_base else {})
        save_file(tensors, part / WEIGHTS, metadata=metadata)
        files.sync(part / WEIGHTS)
        write_tokenizer(folder.kept_in(Path(cfg.run.dir)), Path(cfg.run.dir), part)
        changes = compare(part, tensors, adapter)
        part.replace(target)
    size = sum(value.numel() for value in tensors.values())
    line = f"{target}: {len(source.adapters)} adapters of rank {adapter.rank}, {size:,} parameters"
    return line if changes else f"{line}. All of B is 0: the model answers as its base does"


def task_type(cfg: DictConfig) -> str | None:
    """Return peft's word for what the model does.

    With that for classifiers it would look for a head in the folder.
    """
    return None if cfg.model._target_ == others.CLASSIFIER else "CAUSAL_LM"


def targets(source: Source) -> list[str]:
    """Return which modules have adapters: the last parts of their names where all of that name have
    one.
    """
    adapted = {name.removesuffix(".weight") for name in source.adapters}
    every = {name.removesuffix(".weight") for name in (*source.names, *source.lacking)}
    last = {name.rpartition(".")[2] for name in adapted}
    alike = {name for name in every if name.rpartition(".")[2] in last}
    return sorted(last if alike == adapted else adapted)


@dataclass(frozen=True)
class Settings:
    """What adapter_config.json says that changes the result: the rank, the factor of B A, and
    whether it is DoRA.
    """

    rank: int
    scale: float
    dora: bool


def settings(path: Path) -> Settings:
    """Return a folder's settings. Raises ConfigError with everything in them that is not read."""
    config = folder.read_json(path / CONFIG)
    problems = [f"{key}={value}" for key, value in config.items() if value and key not in _KNOWN]
    how = config.get("init_lora_weights")
    problems += [f"init_lora_weights={how}"] * (how not in _INITIALIZED)
    problems += [f"peft_type={config.get('peft_type')}"] * (config.get("peft_type") != "LORA")
    problems += [f"bias={config.get('bias')}"] * (config.get("bias") not in (None, "none"))
    rank, alpha = config.get("r"), config.get("lora_alpha")
    problems += [f"r={rank}"] * (not isinstance(rank, int) or rank < 1)
    problems += [f"lora_alpha={alpha}"] * (not isinstance(alpha, int | float))
    if problems:
        raise ConfigError(
            f"{path / CONFIG}: {', '.join(problems)}: only LoRA and DoRA of whole matrices are "
            "read. "
            "Merge the adapter with peft (merge_and_unload), and name the folder of the result."
        )
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)  # pyright: ignore[reportArgumentType, reportOperatorIssue]
    return Settings(rank, scale, bool(config.get("use_dora")))  # pyright: ignore[reportArgumentType]


def read(path: Path, own: Settings, weights: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return A, B and, of DoRA, the rows' norms by Hugging Face's names of the weights.

    Raises ConfigError with everything that does not belong to these weights, of which only the
    shapes are read.
    """
    adapters = _read(path, dora=own.dora)
    if problems := _mismatches(adapters, weights, own.rank):
        raise ConfigError(
            f"{path}: adapter and base model do not belong together: {folder.some(problems)}."
        )
    return adapters


def added(weight: Tensor, parts: Sequence[Tensor], own: Settings) -> Tensor:
    """Return a weight with its adapter added, in fp32."""
    a, b, *norms = (part.to(weight.device) for part in parts)
    return merged(weight, a, b, scale=own.scale, norms=norms[0].float() if norms else None)


def add_to(model: nn.Module, path: Path) -> None:
    """Add the adapters in a folder to a model's weights, in place. Each matrix must be whole.

    Raises ConfigError with everything that is unreadable, or does not belong to this model.
    """
    own = settings(path)
    rename = module_name if isinstance(model, WrappedModel) else theirs
    weights = {str(rename(name)): param for name, param in model.named_parameters() if rename(name)}
    with torch.no_grad():
        for name, parts in read(path, own, weights).items():
            weights[name].copy_(added(weights[name], parts, own))


def check_base(path: Path, whole: Path) -> None:
    """Raise ConfigError if a folder that `export` wrote has the adapters of another model than the
    folder `whole`.

    Another fine-tune of the same model is said, and allowed. Folders of other programs do not say
    what they belong to.
    """
    try:
        with safe_open(path / WEIGHTS, framework="pt") as opened:
            saved = json.loads((opened.metadata() or {}).get(base.KEY, "null"))
    except (SafetensorError, OSError, ValueError):
        return  # reading the adapters names what is wrong with the file
    if not isinstance(saved, dict):
        return
    found = base.record(whole)
    if found["values"] == saved.get("values"):
        return
    if found["fingerprint"] != saved.get("fingerprint"):
        raise ConfigError(
            f"{path}: the adapters were trained on another model ({saved.get('folder')}) than "
            f"{whole}: "
            f"{folder.CONFIG}, or names, types or shapes of tensors differ. Type --base with that "
            "model's folder."
        )
    log.warning(
        "%s: the adapters were trained on %s. The weights of %s have other values, as those of "
        "another fine-tune.",
        path, saved.get("folder"), whole,
    )  # fmt: skip


def compare(path: Path, expected: Mapping[str, Tensor], adapter: Lora) -> bool:
    """Read a written folder as others do, and return whether its adapters change anything.

    Raises ConfigError if they are not those of the run, or hold NaN.
    """
    if odd := [name for name, value in expected.items() if value.isnan().any()]:
        raise ConfigError(
            f"{path.name}: the run's adapters hold NaN: {folder.some(odd)}. Name an earlier "
            "checkpoint, such "
            "as outputs/RUN/checkpoints/step=000100."
        )
    own = settings(path)
    found = _read(path, dora=own.dora)
    kinds = ("lora_A.weight", "lora_B.weight", *[_NORMS] * own.dora)
    tensors = {
        f"{_PREFIX}{name.removesuffix('.weight')}.{kind}": part
        for name, parts in found.items()
        for kind, part in zip(kinds, parts, strict=True)
    }
    same = tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name]) for name in expected
    )
    if not same or own != Settings(adapter.rank, adapter.scale, adapter.dora):
        raise ConfigError(
            f"{path.name}: what was written is not what the run holds, so it was removed. Please "
            "report this with the "
            "run's config.yaml."
        )
    return own.dora or any(bool(parts[1].any()) for parts in found.values())


def _read(path: Path, *, dora: bool) -> dict[str, list[Tensor]]:
    """Return A, B and, of DoRA, the rows' norms by Hugging Face's names of the weights.

    Raises ConfigError for files that hold something else.
    """
    if not (path / WEIGHTS).is_file():
        raise ConfigError(
            f"{path / WEIGHTS}: this file is missing. Pickled adapters (.bin) are never loaded."
        )
    try:
        tensors = load_file(path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path / WEIGHTS}: it cannot be read ({error}). Copy it again."
        ) from None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        module, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        parts.setdefault(f"{module}.weight", {})[part] = value
    needed = ["lora_A", "lora_B", *[_NORMS] * dora]
    if odd := [name for name, found in parts.items() if set(found) != {*needed}] or [str(path)] * (
        not parts
    ):
        which = "no pair of lora_A and lora_B" + f" with a {_NORMS}" * dora
        raise ConfigError(f"{path / WEIGHTS}: {folder.some(odd)}: {which}.")
    return {name: [found[part] for part in needed] for name, found in parts.items()}


def _mismatches(
    adapters: dict[str, list[Tensor]], weights: Mapping[str, Any], rank: int
) -> list[str]:
    unknown = [f"the model has no {name}" for name in adapters if name not in weights]
    wrong = [
        f"{name} is {tuple(weights[name].shape)}, and its adapter {tuple(b.shape)} × "
        f"{tuple(a.shape)} of rank {rank}"
        for name, (a, b, *norms) in adapters.items()
        if name in weights
        and (
            (*b.shape[:1], *a.shape[1:]) != weights[name].shape
            or (*a.shape[:1], *b.shape[1:]) != (rank, rank)
            or any(each.shape != b.shape[:1] for each in norms)
        )
    ]
    return unknown + wrong
