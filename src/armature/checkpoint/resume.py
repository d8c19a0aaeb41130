"""Which checkpoint a run goes on from. Torch-free: all but the checksums is decided before a process starts."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature import config
from armature.checkpoint import manifest
from armature.errors import ConfigError
from armature.launcher import environment
from armature.validation import signatures

MODES = ("auto", "never", "required")


def folder(run_dir: Path, cfg: Any = None) -> Path:
    """Where a run's checkpoints are: in its directory, or under `checkpoint.root`.

    Args:
        cfg: the run's configuration; read from its directory where it is not given.
    """
    if cfg is None and (run_dir / "config.yaml").is_file():
        cfg = config.load(run_dir / "config.yaml")
    root = OmegaConf.select(cfg, "checkpoint.root") if cfg is not None else None
    return to_path(root) / str(OmegaConf.select(cfg, "run.name")) if root else run_dir / "checkpoints"  # pyright: ignore[reportArgumentType]


def to_path(path: str) -> Path:
    """A path of this machine, or one in an object store (`s3://bucket/folder`, or whatever else fsspec knows)."""
    if "://" not in path:
        return Path(path)
    from upath import UPath

    return UPath(path)  # pyright: ignore[reportReturnType]


def candidates(checkpoints: Path) -> list[Path]:
    """Everything that is named as a checkpoint: what `last` names first, then from the newest to the oldest."""
    if not checkpoints.is_dir():
        return []
    steps = {int(path.name[5:]): path for path in checkpoints.glob("step=*") if path.name[5:].isdigit()}
    newest_first = [steps[step] for step in sorted(steps, reverse=True)]
    pointer = checkpoints / "last"
    named = pointer.read_text().strip() if pointer.is_file() else None
    return sorted(newest_first, key=lambda path: path.name != named)


def last_checkpoint(run_dir: Path, cfg: Any = None) -> Path | None:
    """The checkpoint to go on from, by the files' names and sizes. None where the run has no complete one yet."""
    return next((path for path in candidates(folder(run_dir, cfg)) if manifest.problem(path) is None), None)


def checkpoints_at(path: Path, cfg: Any = None) -> list[Path]:
    """The checkpoints that somebody names by a path: that one itself, or a run directory's, in `candidates`' order."""
    return [path] if (path / "meta.pt").exists() else candidates(folder(path, cfg))


def newest_complete(path: Path) -> Path | None:
    """The first of those; of a run directory's, the first that is complete by its files' names and sizes."""
    named = checkpoints_at(path)
    return next((each for each in named if each == path or manifest.problem(each) is None), None)


def mismatches(cfg: DictConfig, checkpoint: Path) -> list[str]:
    """What of a model, task or optimizer is another than in the run that a checkpoint belongs to."""
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
            if there.get(key) != here.get(key) and not isinstance(
                here.get(key), float
            ):  # a rate may change, a size not
                found.append(
                    f"{key}={here.get(key)}, but {checkpoint} was trained with {key}={there.get(key)}. "
                    f"Type {key}={there.get(key)}, or another run.name to start anew."
                )
    return found


def flat(value: Any, path: str) -> dict[str, Any]:
    """Return what is below `path`, by its full names; an argument that is not set has its constructor's default."""
    if isinstance(value, dict):
        value = signatures.defaults_of(str(value.get("_target_", ""))) | value
        return {k: v for name, inner in value.items() for k, v in flat(inner, f"{path}.{name}").items()}
    return {path: value}


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def problems(cfg: DictConfig) -> list[str]:
    """What is wrong with `resume=` and `checkpoint.root=`, before anything is read but names and sizes."""
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
            f"resume={cfg.resume}: a single file, as Lightning writes it. Take its weights over with "
            f"python scripts/convert.py {cfg.resume} outputs/converted/checkpoints/step=000000, and resume from there."
        ]
    checkpoint = newest_complete(path)
    if checkpoint is None:
        return [
            f"resume={cfg.resume}: there is no complete checkpoint. Name a run directory, or a step=… folder in one."
        ]
    problem = None if cfg.checkpoint.trust else manifest.problem(checkpoint)
    if problem is None:
        return []
    return [f"{checkpoint}: {problem}. Load it only if you trust where it comes from: type checkpoint.trust=true."]


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
    """The checkpoint that this start of the run goes on from, also after a restart of its ranks.

    Raises:
        ConfigError: where the run has checkpoints, but none that is complete: it must not silently start from scratch.
    """
    if cfg.resume == "never" and not environment.is_restarted():
        return None
    own = last_checkpoint(run_dir, cfg)
    if own is None and (there := candidates(folder(run_dir, cfg))):
        raise ConfigError(none_is_sound({path: str(manifest.problem(path)) for path in there}))
    return own or (newest_complete(to_path(cfg.resume)) if cfg.resume not in MODES else None)


def none_is_sound(found: dict[Path, str]) -> list[str]:
    return [
        *(f"{path}: {problem}." for path, problem in found.items()),
        "None of the run's checkpoints is sound. Put one back, or type another run.name to start from step 0.",
    ]
