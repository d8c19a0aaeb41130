"""Check a composed configuration: types and ranges, targets, devices, model, layout, loggers,
folders and data.
"""

import logging
import netrc
import os
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from armature import files, hardware
from armature.checkpoint import resume
from armature.config import OF_ONE_CLASS, OPEN, key_of, unresolved, walk
from armature.data import batching, sources
from armature.errors import ConfigError, error_line
from armature.finetune import check as pretrained
from armature.layout import Layout
from armature.models.plan import module_beside
from armature.planning import auto
from armature.validation import (
    combinations,
    foreign_keys,
    lightning_parts,
    relations,
    signatures,
    targets,
    values,
)
from armature.validation.composing import instantiate

MOST_PROCESSES = 1024  # of one machine, except where CPUs are many
CLASSES = (*OF_ONE_CLASS, *OPEN)
# keys that decide the layout
OF_LAYOUT = ("trainer.num_nodes", "trainer.devices", "launch.", "data.", "strategy.")
# by `_target_`: what looks for data.path without torch, in data modules that have no source
_FIND = {
    "armature.data.table.TableData": sources.find,
    "armature.data.labeled_text.LabeledTextData": sources.find,
    "armature.data.image_folder.ImageFolderData": sources.check_class_folders,
}
_REFERENCE = r"\$\{([\w.]+)\}"
log = logging.getLogger(__name__)


def check(
    cfg: DictConfig, *, prepare: bool = True, open_data: bool = True, overrides: Sequence[str] = ()
) -> DictConfig:
    """Return the configuration with `auto` values decided, or raise a ConfigError with every
    problem that was found.

    Args:
        prepare: the data too, which may take long.
        open_data: build the data source and check it, which may import torch.
        overrides: as typed. One that changes nothing is refused.
    """
    values.hide_secrets(cfg)
    try:
        if problems := _key_problems(cfg):
            raise ConfigError(problems)
        classes = _of_classes(cfg, overrides) or _interpolation_problems(cfg)
        if not classes and typed_problems(cfg, overrides):
            # importing classes takes seconds: a wrong value alone is answered at once
            raise ConfigError(_device_problems(cfg) + _own_problems(cfg))
        return _checked(cfg, prepare=prepare, open_data=open_data, overrides=overrides)
    except ConfigError as error:
        problems = [*error.problems, *typed_problems(cfg, overrides)]
        raise ConfigError([*dict.fromkeys(problems)]) from error


def typed_problems(
    cfg: DictConfig, overrides: Sequence[str], *, uncertain: Container[str] = ()
) -> list[str]:
    """Return what is wrong with typed values by themselves, whatever else is wrong.

    Args:
        uncertain: groups whose classes are not those that were meant.
    """
    raw = unresolved(cfg)
    typed = {*map(key_of, overrides)}
    found = values.wrong_of(typed, raw) | {k: v for k, v in values.secrets(raw) if k in typed}
    of_classes = [key for key in _of_classes(cfg, overrides) if key.split(".")[0] not in uncertain]
    nodes = {group: raw[group] for key in of_classes for group in [key.split(".")[0]]}
    untyped = {path for path, value in walk(raw) if path not in of_classes or "${" in str(value)}
    return [
        *found.values(),
        *targets.problems(nodes, _allowed(cfg), known=untyped | found.keys()),
    ]


def _of_classes(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the typed keys of which only their group's class knows whether it takes them."""
    known = {*values.schema(unresolved(cfg)), *values.OF_OPTIMIZERS}
    pairs = [(each, key_of(each)) for each in overrides]
    return [
        key
        for each, key in pairs
        if "." in key and key.split(".")[0] in CLASSES and (each[0] in "+~" or key not in known)
    ]


def _checked(
    cfg: DictConfig, *, prepare: bool, open_data: bool, overrides: Sequence[str]
) -> DictConfig:
    signatures.allow(cfg.launch.allowed_packages)
    if OmegaConf.select(cfg, "task._target_") is not None:
        if problems := lightning_parts.misplaced_problems(cfg):
            raise ConfigError(problems)
        forget_unused_groups(cfg)
    if problems := _interpolation_problems(cfg):
        raise ConfigError(problems)
    cfg = pretrained.fill(values.written_out(cfg))
    wrong, chosen = values.wrong(cfg, plain(cfg)), None
    unsound = _target_problems(cfg, known=wrong) + _device_problems(cfg)
    problems = [*wrong.values(), *unsound]
    complete = not (unsound or "trainer.devices" in wrong)
    if complete:
        cfg = decide(cfg)
        problems += _loader_problems(cfg)
        sizes = [values.select(plain(cfg), key) for key in wrong if key.startswith("model.")]
        problems += [] if sizes else _model_problems(cfg)
        if not problems:
            cfg, chosen = auto.decide(
                cfg, memory_bytes=auto.device_memory_bytes(cfg), problems=layout_problems
            )
        is_known = not any(key.startswith(OF_LAYOUT) for key in wrong)
        if is_known and all(isinstance(size, int | float) for size in sizes):
            problems += layout_problems(cfg)
        problems += [] if problems else relations.problems(plain(cfg), overrides)
        lightning_parts.warn_of_unused_groups(cfg)
        problems += lightning_parts.unused_problems(cfg, overrides)
    problems += _own_problems(cfg)
    if open_data and complete and not any(key.startswith("data.") for key in wrong):
        problems += _data_problems(cfg, prepare=prepare and not problems)
    if problems:
        raise ConfigError(problems)
    if chosen is not None and prepare:
        log.info(chosen)
    return cfg


def _own_problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with what needs no class: loggers, folders and `resume`."""
    return [
        *_logger_problems(cfg),
        *lightning_parts.package_problems(cfg),
        *_name_problems(cfg.run.name),
        *_folder_problems("run.root", cfg.run.root),
        *_folder_problems("checkpoint.root", cfg.checkpoint.root),
        *_resume_problems(cfg),
    ]


def decide(cfg: DictConfig) -> DictConfig:
    """Replace `auto` by the value for this machine, so that config.yaml records what ran."""
    cfg = for_this_machine(cfg)
    if cfg.launch.max_restarts == "auto":
        cfg.launch.max_restarts = 3 if cfg.trainer.devices * cfg.trainer.num_nodes > 1 else 0
    micro = signatures.defaults_of(cfg.data._target_).get("micro_batch_size", "auto")
    with open_dict(cfg):
        cfg.data.setdefault("global_batch_size", None)
        cfg.data.setdefault("micro_batch_size", micro)
    return cfg


def for_this_machine(cfg: DictConfig) -> DictConfig:
    cfg = cfg.copy()
    if cfg.trainer.accelerator == "auto":
        cfg.trainer.accelerator = hardware.default_accelerator()
    if cfg.trainer.devices == "auto":
        cfg.trainer.devices = (
            max(1, hardware.gpu_count()) if cfg.trainer.accelerator == "gpu" else 1
        )
    if cfg.trainer.precision == "auto":
        cfg.trainer.precision = (
            "bf16-mixed" if hardware.bf16_is_fast(cfg.trainer.accelerator) else "32-true"
        )
    return cfg


def plain(node: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True)  # pyright: ignore[reportReturnType]


def _key_problems(cfg: DictConfig) -> list[str]:
    """Return the keys without a value, and those that `+` added to the core's own groups."""
    written, known = unresolved(cfg), [*values.OF_CORE, *values.GROUPS]
    missing = [
        f"{path}: a value is required. Type {path}=…"
        for path, value in walk(written)
        if value == "???"
    ]
    return missing + [
        f"{key}: there is no such key.{foreign_keys.hint(key, '…', known)}"
        for key in values.unknown(written)
    ]


def forget_unused_groups(cfg: DictConfig) -> None:
    """Replace a group that the task does not take, if it refers to keys that these data do not
    have.
    """
    for name in signatures.unused(cfg.task):
        try:
            _ = None if cfg[name] is None else plain(cfg[name])
        except OmegaConfBaseException:
            with open_dict(cfg):
                cfg[name] = {"_target_": "torch.nn.Identity", "_partial_": True}


def _interpolation_problems(cfg: DictConfig) -> list[str]:
    """Return the references that cannot be resolved, with what to type instead."""
    found: list[str] = []
    for path, value in walk(unresolved(cfg)):
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.select(cfg, path)
            except OmegaConfBaseException as error:
                found += _unresolved(cfg, path, value, error)
    return found


def _unresolved(cfg: DictConfig, path: str, value: str, error: OmegaConfBaseException) -> list[str]:
    """Return why a value cannot be resolved."""
    raw = unresolved(cfg)
    for name in re.findall(_REFERENCE, value):
        if values.select(raw, name) is not values.UNSET:
            continue
        if path.startswith("model.") and name.startswith("data."):
            return _class_problems(cfg) or [
                f"{path}: it is {name}, which these data do not have. Type task=… and model=… for "
                f"them (docs/data.md), or {path}=…."
            ]
        return [
            f"{path}: it is {value}, and there is no key '{name}'. Type {path}=… for its value."
        ]
    refers = ":" not in value and "Recursive" not in str(error)
    if refers or isinstance(error, InterpolationKeyError):
        return []  # what it refers to is told by itself
    for name in re.findall(r"\$\{oc\.env:(\w+)\}", value):
        if name not in os.environ:
            return [
                f"{path}: the environment has no {name}. Type {name}=… before the command, or "
                f"${{oc.env:{name},DEFAULT}}."
            ]
    return [f"{path}: {str(error).partition(chr(10))[0].rstrip('.')}. Type {path}=… for its value."]


def _class_problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with the name of the task's class: an unknown one does not tell which
    groups it takes.
    """
    name = OmegaConf.select(cfg, "task._target_")
    known = isinstance(name, str) and signatures.find_definition(name) is not None
    named = {"task": {"_target_": name} if name else {}}
    return [] if known else targets.problems(named, _allowed(cfg))


def _allowed(cfg: DictConfig) -> list[str]:
    """Return the packages whose classes may be built."""
    return [*dict.fromkeys([*map(str, cfg.launch.allowed_packages), *signatures.own()])]


def _target_problems(cfg: DictConfig, *, known: Container[str]) -> list[str]:
    cfg = for_this_machine(cfg)  # arguments may refer to what is decided later
    for key in ("name", "dir", "id"):
        cfg.run[key] = cfg.run[key] or f"<run.{key}>"
    return targets.problems(plain(cfg), _allowed(cfg), known=known)


def _device_problems(cfg: DictConfig) -> list[str]:
    devices, accelerator = cfg.trainer.devices, cfg.trainer.accelerator
    if not values.accepts(values.OF_CORE["trainer.devices"], devices):
        return []
    if accelerator == "auto":
        accelerator = hardware.default_accelerator()
    if accelerator == "gpu":
        if not (count := hardware.gpu_count()):
            instead = f"trainer.accelerator=cpu trainer.devices={devices}"
            return [f"trainer.accelerator=gpu: this machine has no GPU. Type {instead}."]
        if devices != "auto" and devices > count:
            instead = (
                f"trainer.devices={count}, or trainer.accelerator=cpu to run {devices} CPU "
                "processes"
            )
            return [
                f"trainer.devices={devices}: this machine has {count} GPU{'s' * (count > 1)}. Type "
                f"{instead}."
            ]
    if accelerator == "mps":
        if not hardware.has_mps():
            return [
                "trainer.accelerator=mps: this is not an Apple machine with a GPU. Type "
                "trainer.accelerator=auto."
            ]
        if devices not in ("auto", 1):
            instead = "trainer.devices=1, or trainer.accelerator=cpu"
            return [f"trainer.devices={devices}: mps is one device. Type {instead}."]
    cpus = hardware.cpu_count()
    if accelerator != "cpu" or devices == "auto" or devices <= cpus:
        return []
    if devices > (most := max(MOST_PROCESSES, 8 * cpus)):
        return [f"trainer.devices={devices}: this machine has {cpus} CPUs. Type {most} or less."]
    relations.warn(
        f"trainer.devices={devices} processes share {cpus} CPUs, which is slow. Type "
        f"trainer.devices={cpus} or less."
    )
    return []


def _loader_problems(cfg: DictConfig) -> list[str]:
    task, data, found = cfg.task._target_, cfg.data._target_, []
    loaders = [f"{split}_dataloader" for split in ("train", "val", "test", "predict")]
    if own := [method for method in loaders if signatures.defines(task, method)]:
        found.append(
            f"task._target_={task} has methods of its own for data ({', '.join(own)}), which "
            f"data={data} would replace. Move them to a LightningDataModule and name that in "
            "data._target_, or delete them."
        )
    if signatures.derives_from(data, signatures.OUR_DATA) and (
        own := signatures.replaced(data, loaders)
    ):
        found.append(
            f"data._target_={data} has loaders of its own ({', '.join(own)}), which know neither "
            "the ranks nor the position of a resume. Return samples from dataset(split) and "
            "batches from collate_fn(samples) instead, or derive the class from "
            "LightningDataModule, whose loaders are adapted (docs/data.md)."
        )
    return found


def _model_problems(cfg: DictConfig) -> list[str]:
    if not signatures.accepted(cfg.task, ["model"]):
        return []
    definition = signatures.find_definition(cfg.model._target_)
    module = module_beside(definition.__module__, "check") if definition is not None else None
    arguments = {k: v for k, v in plain(cfg.model).items() if k not in signatures.HYDRA_KEYS}
    return module.problems(arguments) if module is not None else []


def layout_problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with batch sizes, and what the strategy cannot do with this model,
    precision and ranks.
    """
    try:
        layout = Layout.of(cfg)
        if not (problems := combinations.problems(plain(cfg), layout)):
            size = batching.configured_batch_size(cfg.data)
            # else the loaders of a plain LightningDataModule decide it, which each rank reads
            if size is not None:
                key = (
                    "data.global_batch_size"
                    if cfg.data.get("global_batch_size") is not None
                    else "data.batch_size"
                )
                batching.plan_batches(size, cfg.data.micro_batch_size, layout.data_ranks, key=key)
            elif signatures.derives_from(cfg.data._target_, signatures.OUR_DATA):
                return [
                    "data.global_batch_size: a value is required. Type data.global_batch_size=…"
                ]
    except ConfigError as error:
        return error.problems
    return problems


def _data_problems(cfg: DictConfig, *, prepare: bool) -> list[str]:
    """Return why the data are not there. Prepare their source once, so that the ranks only open it;
    if the run is refused anyway, check it quickly.
    """
    source = OmegaConf.select(cfg, "data.source")
    has_source = isinstance(source, DictConfig)
    find = None if has_source else _FIND.get(OmegaConf.select(cfg, "data._target_"))
    if not has_source and find is None:
        return []
    if "path" in cfg.data and not cfg.data.path:
        other = " For the standard library's source type data=stdlib." if has_source else ""
        return [f"data.path=null: name a file, a folder or a pattern.{other}"]
    try:
        if find is not None:
            find(cfg.data.path)
            return []
        made = instantiate(source, _convert_="all")
        if prepare:
            made.prepare()
        elif hasattr(made, "check"):
            made.check()
    except ConfigError as error:
        return error.problems
    except (HydraException, OSError, RecursionError, TypeError, ValueError) as error:
        # a folder that may not be read
        key = "data.path" if find is not None else "data.source"
        rest = "" if find is not None else " and the other keys of data.source"
        return [f"{key}: {error_line(error.__cause__ or error)}. Check data.path{rest}."]
    return []


def _logger_problems(cfg: DictConfig) -> list[str]:
    if os.environ.get("WANDB_MODE", "online") != "online":
        return []
    return [
        f"{key.replace('.', '=')}: Weights & Biases has no key. Put WANDB_API_KEY into .env (or "
        f"run `wandb login`), or type {key}.offline=true."
        for key, target in signatures.targets_in(cfg, "logger")
        if "wandb" in target.lower()
        and not OmegaConf.select(cfg, f"{key}.offline")
        and not _has_wandb_key()
    ]


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _name_problems(name: str | None) -> list[str]:
    if name is None:
        return []
    parts = Path(name).parts
    if parts and not Path(name).is_absolute() and ".." not in parts:
        return []
    return [f"run.name={name}: must be a folder below run.root. Type run.root=… for another place."]


def _folder_problems(key: str, folder: str | None) -> list[str]:
    if folder is None:
        return []
    if "://" in folder:
        return [
            f"{key}={folder}: must be a folder of this machine. Type checkpoint.root={folder} for "
            "the checkpoints."
        ] * (key == "run.root")
    try:
        existing = files.nearest_existing(Path(os.path.expanduser(folder)))
    except (OSError, ValueError) as error:
        return [f"{key}={folder}: no folder can have this name ({error}). Type another {key}."]
    if not existing.is_dir():
        return [f"{key}={folder}: {existing} is a file. Type {key}=… with a folder."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{key}={folder}: {existing} cannot be written. Type another {key}."]
    return []


def _resume_problems(cfg: DictConfig) -> list[str]:
    try:
        return resume.problems(cfg)
    except (OSError, ValueError) as error:
        # a name that no path can have, a folder that may not be read
        return [
            f"resume={cfg.resume}: it cannot be read ({error}). Name a run directory, or a step=… "
            "folder in one."
        ]
