"""Which checkpoint a run goes on from. Torch-free: decided before a process starts."""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

MODES = ("auto", "never", "required")


def last_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint that `checkpoints/last` names. None where the run has none yet."""
    pointer = run_dir / "checkpoints" / "last"
    if not pointer.is_file():
        return None
    checkpoint = pointer.parent / pointer.read_text().strip()
    return checkpoint if checkpoint.is_dir() else None


def find(path: Path) -> Path | None:
    """The checkpoint meant by a path: itself, or the last one of a run directory."""
    if (path / "meta.pt").exists():
        return path
    return last_checkpoint(path)


def mismatches(cfg: DictConfig, checkpoint: Path) -> list[str]:
    """What of a model, task or optimiser is another than in the run that a checkpoint belongs to."""
    file = checkpoint.parents[1] / "config.yaml"
    if not file.is_file():
        return []
    saved = OmegaConf.load(file)
    found = []
    for group in ("model", "task._target_", "optimizer._target_"):
        there, here = (_flat(OmegaConf.select(c, group, default=None), group) for c in (saved, cfg))
        for key in sorted(there.keys() | here.keys()):
            if there.get(key) != here.get(key) and not isinstance(
                here.get(key), float
            ):  # a rate may change, a size not
                found.append(
                    f"{key}={here.get(key)}, but {checkpoint} was trained with {key}={there.get(key)}. "
                    f"Type {key}={there.get(key)}, or another run.name to start anew."
                )
    return found


def _flat(node: Any, path: str) -> dict[str, Any]:
    if isinstance(node, DictConfig):
        return {k: v for name in map(str, node) for k, v in _flat(node[name], f"{path}.{name}").items()}
    return {path: OmegaConf.to_container(node) if isinstance(node, ListConfig) else node}


def problems(cfg: DictConfig) -> list[str]:
    if cfg.resume in MODES:
        return []
    path = Path(cfg.resume)
    if not path.exists():
        return [f"resume={cfg.resume}: no such path (and not one of {', '.join(MODES)})."]
    if find(path) is None:
        return [
            f"resume={cfg.resume}: there is no complete checkpoint. Name a run directory, or a step=… folder in one."
        ]
    return []


def checkpoint_for(cfg: DictConfig, run_dir: Path) -> Path | None:
    """The checkpoint that this start of the run goes on from, also after a restart of its ranks."""
    own = last_checkpoint(run_dir)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if cfg.resume == "never" and not restarted:
        return None
    return own or (find(Path(cfg.resume)) if cfg.resume not in MODES else None)
