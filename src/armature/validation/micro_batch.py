"""What data.micro_batch_size=auto stands for: a rank's whole share, or less where memory lacks.

Torch-free.

The size is kept in config.yaml as `run.micro_batch_size`; `data.micro_batch_size` stays `auto`.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature import config, run_dir
from armature.checkpoint import resume
from armature.data import batching
from armature.errors import ConfigError
from armature.validation import checks

AUTO = "auto"
GROUPS = ("model", "data", "optimizer", "strategy")  # with others, another size may fit
# keys of the data without effect on it
NO_MATTER = ("eval_batch_size", "num_workers", "path", "cache_dir", "seed")


def is_auto(cfg: DictConfig) -> bool:
    return OmegaConf.select(cfg, "data.micro_batch_size") == AUTO


def decided(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the size that `auto` stands for, if one was found."""
    size = _found(cfg) if is_auto(cfg) else None
    return cfg if size is None else with_size(cfg, size)


def _found(cfg: DictConfig) -> int | None:
    # config.yaml of an older version has no such key
    return OmegaConf.select(cfg, "run.micro_batch_size")


def with_size(cfg: DictConfig, size: int | str) -> DictConfig:
    changed = cfg.copy()
    changed.data.micro_batch_size = size
    return changed


def recorded(cfg: DictConfig) -> int | None:
    """Return the size that earlier starts of the run have found under the same circumstances, or
    None.
    """
    folder = Path(cfg.run.dir)
    if not (folder / "config.yaml").is_file() and cfg.resume not in resume.MODES:
        folder = resume.run_of(resume.to_path(cfg.resume))
    if folder is None:
        return None
    try:
        there = run_dir.read(folder)
    except ConfigError:  # there is none, or it is damaged: whatever needs it reports it
        return None
    size = _found(there)
    if size is None or not is_auto(there) or checks.layout_problems(with_size(cfg, size)):
        return None
    return size if _circumstances(there) == _circumstances(cfg) else None


def _circumstances(cfg: DictConfig) -> dict[str, Any]:
    plain = config.without_secrets(cfg)
    found = {group: resume.flat(plain.get(group), group) for group in GROUPS}
    found["data"] = {
        key: value
        for key, value in found["data"].items()
        if key.rpartition(".")[2] not in NO_MATTER
    }
    return found | {key: plain["trainer"][key] for key in ("devices", "num_nodes", "precision")}


def smaller(cfg: DictConfig, batches: batching.Batches) -> int | None:
    """Return the next smaller size that divides a rank's share of the same global batch, or None if
    there is none.

    A pipeline needs a multiple of its own micro-batches; a module that optimizes manually takes no
    other size.
    """
    share = batches.global_batch_size // batches.data_ranks
    sizes = (size for size in range(batches.micro_batch_size - 1, 0, -1) if share % size == 0)
    return next((size for size in sizes if not checks.layout_problems(with_size(cfg, size))), None)
