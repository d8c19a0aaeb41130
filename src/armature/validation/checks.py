"""Check a composed configuration: types and ranges, targets, devices, model, layout, loggers, folders and data."""

import difflib
import logging
import netrc
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from armature import hardware
from armature.checkpoint import resume
from armature.config import Config
from armature.data import batching
from armature.errors import ConfigError
from armature.layout import Layout
from armature.models.plan import module_beside
from armature.validation import foreign_keys, lightning_parts, manual, parallelism, signatures

log = logging.getLogger(__name__)

CHOICES = {
    "trainer.accelerator": ("auto", "cpu", "gpu", "mps"),
    "trainer.precision": ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true"),
    "trainer.gradient_clip_algorithm": ("norm", "value"),
    "trainer.matmul_precision": ("highest", "high", "medium"),
    "checkpoint.mode": ("min", "max"),
    "checkpoint.on_failure": ("continue", "stop"),
}
ALIASES = {"fp16": "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed", "fp32": "32-true", "32": "32-true",
           "cuda": "gpu"}  # fmt: skip
_SECRET = re.compile(r"(^|_)(api_?key|token|password|passwd|secret|credentials?)$", re.IGNORECASE)
_SOURCES = Path(__file__).parents[2]  # src/: a user's own package next to ours may be named in `_target_`


def check(cfg: DictConfig, *, prepare: bool = True) -> DictConfig:
    """Return the configuration with `auto` values decided, or raise a ConfigError with every problem that was found.

    `prepare` the data too, which may take long.
    """
    if problems := (_missing_problems(cfg) + _unknown_problems(cfg)) or _interpolation_problems(cfg):
        raise ConfigError(problems)
    problems = _choice_problems(cfg) + _range_problems(cfg) + _secret_problems(cfg)
    unsound = _target_problems(cfg) + _device_problems(cfg)
    problems += unsound
    if not unsound:
        cfg = decide(cfg)
        problems += (
            _loader_problems(cfg)
            + _model_problems(cfg)
            + layout_problems(cfg)
            + _launch_problems(cfg)
            + manual.problems(cfg)
        )
    problems += lightning_parts.problems(cfg) + _logger_problems(cfg)
    problems += _name_problems(cfg.run.name) + _folder_problems(Path(cfg.run.root))
    problems += resume.problems(cfg)
    problems += _data_problems(cfg, prepare=prepare and not problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return cfg


def decide(cfg: DictConfig) -> DictConfig:
    """Replace `auto` by the value for this machine, so that config.yaml records what ran."""
    cfg = cfg.copy()
    if cfg.trainer.accelerator == "auto":
        cfg.trainer.accelerator = hardware.default_accelerator()
    if cfg.trainer.devices == "auto":
        cfg.trainer.devices = max(1, hardware.gpu_count()) if cfg.trainer.accelerator == "gpu" else 1
    if cfg.trainer.precision == "auto":
        cfg.trainer.precision = "bf16-mixed" if hardware.bf16_is_fast(cfg.trainer.accelerator) else "32-true"
    if cfg.launch.max_restarts == "auto":
        cfg.launch.max_restarts = 3 if cfg.trainer.devices * cfg.trainer.num_nodes > 1 else 0
    if not signatures.derives_from(
        cfg.data._target_, signatures.OUR_DATA
    ):  # a plain LightningDataModule (data/adapter.py)
        with open_dict(cfg):
            for key, value in (("global_batch_size", None), ("micro_batch_size", "auto")):
                cfg.data.setdefault(key, value)
    return cfg


def plain(node: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True)  # pyright: ignore[reportReturnType]


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in node:
        path = f"{prefix}{key}"
        yield path, node[key]
        if isinstance(node[key], dict):
            yield from _walk(node[key], f"{path}.")


def _missing_problems(cfg: DictConfig) -> list[str]:
    raw = OmegaConf.to_container(cfg, resolve=False)
    return [f"{path}: a value is required. Type {path}=…" for path, value in _walk(raw) if value == "???"]


def _unknown_problems(cfg: DictConfig) -> list[str]:
    """Return the keys that `+` added to the core's own groups, where nothing would read them."""
    problems = []
    for path, kind in (("", Config), *((f.name, f.type) for f in fields(Config) if is_dataclass(f.type))):
        known, prefix = [f.name for f in fields(kind)], f"{path}." if path else ""
        for key in map(str, OmegaConf.select(cfg, path) if path else cfg):
            if key not in known:
                known = [name for name in known if not foreign_keys.is_opposite(key, name)]
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f" Did you mean '{prefix}{near[0]}'?" if near else ""
                hint = f" {remedy}" if (remedy := foreign_keys.remedy(f"{prefix}{key}")) else hint
                problems.append(f"{prefix}{key}: there is no such key.{hint}")
    return problems


def _interpolation_problems(cfg: DictConfig) -> list[str]:
    try:
        plain(cfg)
    except OmegaConfBaseException as error:
        return ["; ".join(line.strip() for line in str(error).splitlines() if line.strip())]
    return []


def _choice_problems(cfg: DictConfig) -> list[str]:
    problems = []
    for key, choices in CHOICES.items():
        value = OmegaConf.select(cfg, key)
        if value not in choices:
            meant = ALIASES.get(str(value)) or next(iter(difflib.get_close_matches(str(value), choices, 1, 0.4)), None)
            hint = f" Did you mean {key}={meant}?" if meant else ""
            problems.append(f"{key}={value}: must be one of {', '.join(choices)}.{hint}")
    return problems


def _range_problems(cfg: DictConfig) -> list[str]:
    problems, trainer = [], cfg.trainer
    if trainer.max_steps is None and trainer.max_epochs is None:
        problems.append(
            "trainer.max_steps=null and trainer.max_epochs=null: the run would never end. "
            "Type trainer.max_steps=… or trainer.max_epochs=…."
        )
    positive = ["num_nodes", "max_steps", "max_epochs", "val_every_n_steps", "log_every_n_steps"]
    every = [f"checkpoint.{key}" for key in ("every_n_steps", "every_n_minutes", "keep_every_n_steps")]
    for key in [*(f"trainer.{key}" for key in positive), *every, "data.train_limit", "data.eval_batch_size"]:
        value = OmegaConf.select(cfg, key)
        if isinstance(value, (int, float)) and value <= 0:
            problems.append(f"{key}={value}: must be positive (or null, if it may be off).")
    workers = OmegaConf.select(cfg, "data.num_workers")
    if isinstance(workers, int) and workers < 0:
        problems.append(f"data.num_workers={workers}: must not be negative. Type 0 to load in the training process.")
    rate = OmegaConf.select(cfg, "optimizer.lr")
    if isinstance(rate, (int, float)) and rate <= 0:
        problems.append(f"optimizer.lr={rate}: must be positive.")
    base_width = OmegaConf.select(cfg, "optimizer.base_width")
    if base_width is not None and (not isinstance(base_width, int) or base_width < 1):
        problems.append(f"optimizer.base_width={base_width}: must be a model's width, or null.")
    if (kept := cfg.checkpoint.keep_last) < 1:
        problems.append(f"checkpoint.keep_last={kept}: must be at least 1, or nothing could be resumed.")
    if (limit := trainer.max_time) is not None and not re.fullmatch(r"\d+:\d{2}:\d{2}:\d{2}", limit):
        problems.append(f"trainer.max_time={limit}: must be DD:HH:MM:SS, as in trainer.max_time=00:12:00:00.")
    return problems


def _secret_problems(cfg: DictConfig) -> list[str]:
    raw = OmegaConf.to_container(cfg, resolve=False)
    return [
        f"{path}: a secret typed here would be written to config.yaml. Put it into .env and refer to it, "
        f"as in '{path}=${{oc.env:{path.rsplit('.', 1)[-1].upper()}}}'."
        for path, value in _walk(raw)
        if _SECRET.search(path.rsplit(".", 1)[-1]) and isinstance(value, str) and value and "${" not in value
    ]


def _target_problems(cfg: DictConfig) -> list[str]:
    own = [p.name for p in _SOURCES.iterdir() if p.is_dir() and (p / "__init__.py").exists()]
    allowed = [*cfg.launch.allowed_packages, *(name for name in own if name not in cfg.launch.allowed_packages)]
    nodes = {group: node for group, node in plain(cfg).items() if isinstance(node, dict)}
    return [problem for group, node in nodes.items() for problem in signatures.problems(group, node, allowed)]


def _device_problems(cfg: DictConfig) -> list[str]:
    devices, accelerator = cfg.trainer.devices, cfg.trainer.accelerator
    if devices != "auto" and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        remedy = foreign_keys.remedy("trainer.devices", str(devices))
        hint = f" {remedy}" if remedy else ""
        return [f"trainer.devices={devices}: must be a number of processes on each machine, or auto.{hint}"]
    if accelerator == "auto":
        accelerator = hardware.default_accelerator()
    if accelerator == "gpu":
        if not (count := hardware.gpu_count()):
            instead = f"trainer.accelerator=cpu trainer.devices={devices}"
            return [f"trainer.accelerator=gpu: this machine has no GPU. Type {instead}."]
        if devices != "auto" and devices > count:
            instead = f"trainer.devices={count}, or trainer.accelerator=cpu to run {devices} CPU processes"
            return [f"trainer.devices={devices}: this machine has {count} GPU{'s' * (count > 1)}. Type {instead}."]
    if accelerator == "mps":
        if not hardware.has_mps():
            return ["trainer.accelerator=mps: this is not an Apple machine with a GPU. Type trainer.accelerator=auto."]
        if devices not in ("auto", 1):
            instead = "trainer.devices=1, or trainer.accelerator=cpu"
            return [f"trainer.devices={devices}: mps is one device. Type {instead}."]
    if accelerator == "cpu" and devices != "auto" and devices > hardware.cpu_count():
        log.warning("trainer.devices=%s processes share %s CPUs, which is slow.", devices, hardware.cpu_count())
    return []


def _loader_problems(cfg: DictConfig) -> list[str]:
    task, loaders = cfg.task._target_, [f"{split}_dataloader" for split in ("train", "val", "test", "predict")]
    if not (own := [method for method in loaders if signatures.defines(task, method)]):
        return []
    return [
        f"task._target_={task} has methods of its own for data ({', '.join(own)}), which data={cfg.data._target_} "
        "would replace. Move them to a LightningDataModule and name that in data._target_, or delete them."
    ]


def _model_problems(cfg: DictConfig) -> list[str]:
    task, model = cfg.task._target_, cfg.model._target_
    if not signatures.accepted(cfg.task, ["model"]):
        return []
    trained, given = (signatures.class_attribute(target, "modality") for target in (task, model))
    if trained != given and None not in (trained, given):
        return [
            f"task={task.rpartition('.')[2]} trains on {trained}, but model={model.rpartition('.')[2]} takes {given}. "
            "Type task=language_modeling with a decoder and text, or task=image_classification with a model and data "
            "of images."
        ]
    definition = signatures.find_definition(model)
    module = module_beside(definition[0], "check") if definition is not None else None
    arguments = {k: v for k, v in plain(cfg.model).items() if k not in signatures.HYDRA_KEYS}
    return module.problems(arguments) if module is not None else []


def layout_problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with batch sizes, and what the strategy cannot do with this model, precision and ranks."""
    try:
        layout = Layout.of(cfg)
        if not (problems := parallelism.problems(plain(cfg), layout)):
            size = batching.configured_batch_size(cfg.data)
            if size is not None:  # else the loaders of a plain LightningDataModule decide it, which each rank reads
                key = "data.global_batch_size" if cfg.data.get("global_batch_size") is not None else "data.batch_size"
                batching.plan_batches(size, cfg.data.micro_batch_size, layout.data_ranks, key=key)
            elif signatures.derives_from(cfg.data._target_, signatures.OUR_DATA):
                return ["data.global_batch_size: a value is required. Type data.global_batch_size=…"]
    except ConfigError as error:
        return error.problems
    return problems


def _launch_problems(cfg: DictConfig) -> list[str]:
    launch, devices, problems = cfg.launch, cfg.trainer.devices, []
    if not isinstance(launch.max_restarts, int) or isinstance(launch.max_restarts, bool) or launch.max_restarts < 0:
        problems.append(f"launch.max_restarts={launch.max_restarts}: must be a number from 0, or auto.")
    if launch.min_ranks is not None:
        asked, wrong = f"launch.min_ranks={launch.min_ranks}", None
        if not 1 <= launch.min_ranks <= devices:
            wrong = f": must be from 1 to trainer.devices={devices}, or null for a fixed number of ranks."
        elif cfg.trainer.num_nodes > 1 or launch.rdzv_endpoint:
            wrong = ": the number of ranks on several machines is fixed. Type launch.min_ranks=null."
        elif launch.max_restarts == 0:
            instead = "launch.max_restarts=auto, or launch.min_ranks=null"
            wrong = f", but launch.max_restarts=0: no rank is restarted. Type {instead}."
        problems += [f"{asked}{wrong}"] if wrong else []
    for key in ("hang_timeout", "stop_minutes_before_limit"):
        if launch[key] is not None and launch[key] <= 0:
            problems.append(f"launch.{key}={launch[key]}: must be positive, or null for never.")
    if launch.grace_seconds < 0:
        problems.append(f"launch.grace_seconds={launch.grace_seconds}: must not be negative.")
    return problems


def _logger_problems(cfg: DictConfig) -> list[str]:
    if os.environ.get("WANDB_MODE", "online") != "online":
        return []
    return [
        f"logger={name}: Weights & Biases has no key. Put WANDB_API_KEY into .env (or run `wandb login`), "
        f"or type logger.{name}.offline=true."
        for name, node in (cfg.logger or {}).items()
        if "wandb" in str(node.get("_target_", "")).lower() and not node.get("offline", False) and not _has_wandb_key()
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
    if name is None or (name and not Path(name).is_absolute() and ".." not in Path(name).parts):
        return []
    return [f"run.name={name}: must be a folder below run.root. Type run.root=… for another place."]


def _folder_problems(folder: Path) -> list[str]:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        return [f"run.root={folder}: {existing} is a file. Type run.root=… with a folder."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run.root={folder}: {existing} cannot be written. Type another run.root."]
    return []


def _data_problems(cfg: DictConfig, *, prepare: bool) -> list[str]:
    """Prepare the data source once, so that the ranks only open it; if the run is refused anyway, check it quickly."""
    if not isinstance(OmegaConf.select(cfg, "data.source"), DictConfig):
        return []
    try:
        source = instantiate(cfg.data.source)
        if prepare:
            source.prepare()
        elif hasattr(source, "check"):
            source.check()
    except ConfigError as error:
        return error.problems
    return []
