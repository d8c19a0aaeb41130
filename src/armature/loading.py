"""Load a trained model from a run directory or one of its checkpoints, without the command line that trained it."""

import inspect
from pathlib import Path

import lightning.pytorch as L
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from armature import run_dir
from armature.checkpoint import directory, resume, storage
from armature.checkpoint.state import load_full_state_dict
from armature.errors import ConfigError


def open_run(
    path: Path, *, best: bool = False, overrides: list[str] | None = None, trust: bool = False
) -> tuple[DictConfig, Path]:
    """Return the configuration of a run, with run.dir set to where it is now, and one of its checkpoints, verified.

    Args:
        path: a run directory (its last checkpoint, or its best with `best`), or one checkpoint in it.
        overrides: `key=value`, applied to the run's configuration.
        trust: accept a checkpoint without a manifest.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such path. Name a run directory, such as outputs/<run.name>.")
    run_path = path.parents[1] if directory.is_checkpoint(path) else path
    cfg = run_dir.read(run_path)
    OmegaConf.set_struct(cfg, True)
    for override in overrides or []:
        key, _, value = override.partition("=")
        if OmegaConf.select(cfg, key, default=run_dir) is run_dir:
            raise ConfigError(f"{override}: the run's configuration has no key '{key}'.")
        OmegaConf.update(cfg, key, OmegaConf.from_dotlist([f"value={value}"]).value)
    OmegaConf.update(cfg, "run.dir", str(run_path))
    if path == run_path and best:
        name = (run_dir.read_summary(run_path) or {}).get("best_checkpoint")
        named = [resume.folder(run_path, cfg) / Path(name).name] if name else []
    else:
        named = resume.checkpoints_at(path, cfg)
    checkpoint = storage.first_intact(named, trust=trust)
    if checkpoint is None:
        raise ConfigError(f"{path}: the run has no {'best' if best else 'complete'} checkpoint yet.")
    return cfg, checkpoint


def build_task(cfg: DictConfig) -> L.LightningModule:
    """Build the task. Of the factories model, optimizer and scheduler it is given those that its constructor takes."""
    taken = inspect.signature(get_class(cfg.task._target_)).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    names = [
        name
        for name in ("model", "optimizer", "scheduler")
        if (open_ended or name in taken) and name not in cfg.task  # else it is a value for an argument of that name
    ]
    return instantiate(cfg.task, **{name: instantiate(cfg[name]) for name in names})


def load_task(cfg: DictConfig, checkpoint: Path | None = None) -> L.LightningModule:
    """Return the task with its whole model on the CPU, and a checkpoint's weights, saved under any layout."""
    task = build_task(cfg)
    task.configure_model()
    if any(p.is_meta for p in task.parameters()):
        task.to_empty(device="cpu")
    if checkpoint is not None:
        task.load_state_dict(load_full_state_dict(checkpoint), strict=True, assign=True)
    return task.eval()
