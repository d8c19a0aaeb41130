"""Which checkpoint a run resumes from. Torch-free: everything but the checksums is checked before a process starts."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature import config
from armature.checkpoint import directory
from armature.errors import ConfigError
from armature.launcher import environment
from armature.validation import signatures

MODES = ("auto", "never", "required")


def folder(run_dir: Path, cfg: Any = None) -> Path:
    """Return the folder of a run's checkpoints: in its directory, or under `checkpoint.root`.

    Args:
        cfg: the run's configuration; None: read it from the run directory.
    """
    if cfg is None and (run_dir / "config.yaml").is_file():
        cfg = config.load(run_dir / "config.yaml")
    root = OmegaConf.select(cfg, "checkpoint.root") if cfg is not None else None
    return to_path(root) / str(OmegaConf.select(cfg, "run.name")) if root else directory.folder_of(run_dir)  # pyright: ignore[reportArgumentType]


def to_path(path: str) -> Path:
    """Return a path of this machine, or one in an object store (`s3://bucket/folder`, or another that fsspec knows)."""
    if "://" not in path:
        return Path(path)
    from upath import UPath

    return UPath(path)  # pyright: ignore[reportReturnType]


def candidates(checkpoints: Path) -> list[Path]:
    """Return everything that is named as a checkpoint: first what `last` names, then from newest to oldest."""
    newest_first = [*directory.checkpoints_in(checkpoints).values()][::-1]
    named = directory.read_last(checkpoints) if newest_first else None
    return sorted(newest_first, key=lambda path: path.name != named)


def last_checkpoint(run_dir: Path, cfg: Any = None) -> Path | None:
    """Return the checkpoint to resume from, judged by names and sizes, or None if the run has no complete one yet."""
    return next((path for path in candidates(folder(run_dir, cfg)) if directory.problem(path) is None), None)


def checkpoints_at(path: Path, cfg: Any = None) -> list[Path]:
    """Return the checkpoint at a path, or those of the run directory at that path, in the order of `candidates`."""
    return [path] if directory.is_checkpoint(path) else candidates(folder(path, cfg))


def newest_complete(path: Path) -> Path | None:
    """Return the checkpoint at a path, or a run directory's first complete one, judged by names and sizes."""
    named = checkpoints_at(path)
    return next((each for each in named if each == path or directory.problem(each) is None), None)


def mismatches(cfg: DictConfig, checkpoint: Path) -> list[str]:
    """Return how model, task or optimizer differ from those of the run that a checkpoint belongs to."""
    run_dir = Path(cfg.run.dir)
    own = checkpoint.parent == folder(run_dir, cfg)
    file = (run_dir if own else checkpoint.parents[1]) / "config.yaml"
    if not file.is_file():
        return []
    saved = config.load(file)
    found = []
    for group in ("model", "task._target_", "optimizer._target_"):
        there, here = (flat(_plain(OmegaConf.select(c, group, default=None)), group) for c in (saved, cfg))
        for key in sorted(there.keys() | here.keys()):
            is_rate = isinstance(here.get(key), float)  # rates may change, sizes may not
            if there.get(key) != here.get(key) and not is_rate:
                found.append(
                    f"{key}={here.get(key)}, but {checkpoint} was trained with {key}={there.get(key)}. "
                    f"Type {key}={there.get(key)}, or another run.name to start from step 0."
                )
    return found


def flat(value: Any, path: str) -> dict[str, Any]:
    """Return the values below `path` by their full keys; an argument that is not set has its constructor's default."""
    if isinstance(value, dict):
        value = signatures.defaults_of(str(value.get("_target_", ""))) | value
        return {k: v for name, inner in value.items() for k, v in flat(inner, f"{path}.{name}").items()}
    return {path: value}


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with `resume=` and `checkpoint.root=`, judged by names and sizes of files only."""
    unreachable = [
        problem
        for key, value in (("checkpoint.root", cfg.checkpoint.root), ("resume", cfg.resume))
        if value and (problem := _unreachable(key, value))
    ]
    if unreachable or cfg.resume in MODES:
        return unreachable
    path = to_path(cfg.resume)
    if not path.exists():
        return [f"resume={cfg.resume}: no such path (and not one of {', '.join(MODES)})."]
    if path.suffix == ".ckpt":
        return [
            f"resume={cfg.resume}: a single file, as Lightning writes it. Convert its weights with "
            f"python scripts/convert.py {cfg.resume} outputs/converted/checkpoints/step=000000, and resume from there."
        ]
    checkpoint = newest_complete(path)
    if checkpoint is None:
        return [
            f"resume={cfg.resume}: there is no complete checkpoint. Name a run directory, or a step=… folder in one."
        ]
    problem = None if cfg.checkpoint.trust else directory.problem(checkpoint)
    if problem is None:
        return []
    return [f"{checkpoint}: {problem}. Load it only if you trust its source: type checkpoint.trust=true."]


def _unreachable(key: str, value: str) -> str | None:
    if "://" not in value:
        return None
    import fsspec

    try:
        fsspec.get_filesystem_class(value.split("://")[0])
    except (ValueError, ImportError) as error:
        return f"{key}={value}: {error}."
    return None


def checkpoint_for(cfg: DictConfig, run_dir: Path) -> Path | None:
    """Return the checkpoint that this start of the run resumes from, also after a restart of its ranks, or None.

    Raises:
        ConfigError: if the run has checkpoints, but no complete one: it must not silently start from step 0.
    """
    if cfg.resume == "never" and not environment.is_restarted():
        return None
    own = last_checkpoint(run_dir, cfg)
    if own is None and (incomplete := candidates(folder(run_dir, cfg))):
        raise ConfigError(
            [
                *(f"{path}: {directory.problem(path)}." for path in incomplete),
                "None of the run's checkpoints is complete. Restore one, or type another run.name to start at step 0.",
            ]
        )
    return own or (newest_complete(to_path(cfg.resume)) if cfg.resume not in MODES else None)
