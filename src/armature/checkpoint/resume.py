"""Which checkpoint a run resumes from.

Torch-free: everything but the checksums is checked before a process starts.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature import config
from armature.checkpoint import directory
from armature.errors import ConfigError, error_line
from armature.finetune import folder as pretrained
from armature.launcher import environment
from armature.validation import signatures

MODES = ("auto", "never", "required")
GROUPS = ("seed", "task", "model", "data", "optimizer", "scheduler", "callbacks", "trainer")
RESULT_GROUPS = (*GROUPS[:6], "checkpoint")
NO_EFFECT = (  # names of keys that do not change the result
    "num_workers",
    "micro_batch_size",
    "eval_batch_size",
    "cache_dir",
)
PER_START = frozenset(  # settings of a start rather than of the run
    f"trainer.{name}"
    for name in ("accelerator", "devices", "num_nodes", "max_time", "log_every_n_steps", "profile")
)
_SAME_SAMPLE = " The run continues at the same sample."
NOTES = {  # what else follows from another value at a resume, by the key's name
    "seed": " Samples come in another order, so this epoch may repeat and miss some; weights and "
    "random state stay the checkpoint's.",
    "global_batch_size": _SAME_SAMPLE,
    "batch_size": _SAME_SAMPLE,
}


def folder(run_dir: Path, cfg: Any = None) -> Path:
    """Return the folder of a run's checkpoints: in its directory, or under `checkpoint.root` of its
    configuration.

    Args:
        cfg: the run's configuration, if it is trusted or checked; None: its config.yaml, which may
            be a stranger's.
    """
    if cfg is None and (file := run_dir / "config.yaml").is_file():
        cfg = config.load(file)
        config.require_plain_addresses(cfg, file, groups=["checkpoint"])
    root = OmegaConf.select(cfg, "checkpoint.root") if cfg is not None else None
    return (
        to_path(root) / str(OmegaConf.select(cfg, "run.name"))  # pyright: ignore[reportArgumentType]
        if root
        else directory.folder_of(run_dir)
    )


def to_path(path: str | Path) -> Path:
    """Return a path of this machine, or one in an object store (`s3://bucket/folder`, or another
    that fsspec knows).
    """
    if not isinstance(path, str):
        return path
    if "://" not in path:
        return Path(os.path.expanduser(path))  # a shell leaves the ~ of key=~/… as it is
    from upath import UPath

    return UPath(path)  # pyright: ignore[reportReturnType]


def candidates(checkpoints: Path) -> list[Path]:
    """Return everything that is named as a checkpoint: first what `last` names, then from newest to
    oldest.
    """
    newest_first = [*directory.checkpoints_in(checkpoints).values()][::-1]
    named = directory.read_last(checkpoints) if newest_first else None
    return sorted(newest_first, key=lambda path: path.name != named)


def checkpoints_at(path: Path, cfg: Any = None) -> list[Path]:
    """Return the checkpoint at a path, or those of the run directory at that path, in the order of
    `candidates`.
    """
    if directory.is_file(path) or (path / directory.META).exists():
        return [path]
    return candidates(folder(path, cfg))


def run_of(path: Path) -> Path | None:
    """Return the run directory that a path is or lies in (`checkpoints/step=000120`,
    `checkpoints/x.ckpt`), or None.

    A folder around it must have the config.yaml of a run. That of the path itself may be damaged:
    reading it names it.
    """
    if (path / "config.yaml").is_file():
        return path
    nearest_first = (*path.parents[:3], *path.absolute().parents[:3])
    return next(
        (folder for folder in nearest_first if config.is_of_a_run(folder / "config.yaml")), None
    )


def last_checkpoint(path: Path, cfg: Any = None) -> Path | None:
    """Return the checkpoint at a path, or a run directory's first complete one, judged by names and
    sizes, or None.
    """
    named = checkpoints_at(path, cfg)
    return next((each for each in named if each == path or directory.problem(each) is None), None)


def mismatches(cfg: DictConfig, checkpoint: Path) -> list[str]:
    """Return how model, task or optimizer differ from those of the run that a checkpoint belongs
    to.
    """
    if (recorded := _recorded_run(cfg, checkpoint)) is None:
        return []
    trained_in, saved = recorded
    found = []
    whole = ("model", "task._target_", "task.adapter", "optimizer._target_")
    for group in ("model",) if directory.is_file(checkpoint) else whole:
        if group.split(".")[0] in signatures.unused(cfg.task):
            continue
        there, here = (flat(OmegaConf.select(c, group), group) for c in (saved, cfg))
        kind, keys = f"{group}._target_", sorted(there.keys() | here)
        if there.get(kind) != here.get(kind):  # their other keys have nothing in common
            keys = [kind]
        for key in keys:
            now, then = here.get(key), there.get(key)
            # rates may change, sizes may not; of an adapter, alpha is part of what the weights
            # compute; the folder of a pretrained model may have moved
            may_change = (isinstance(now, float) and key != "task.adapter.alpha") or (
                key == "model.pretrained" and now and pretrained.is_same(str(now), trained_in)
            )
            if then != now and not may_change:
                typed = f"{key}={then}"
                if key.endswith("_target_"):  # a class has other arguments, too
                    typed = f"what {trained_in}/overrides.txt has"
                found.append(
                    f"{key}={now}, but {checkpoint} was trained with {key}={then}. "
                    f"Type {typed}, or another run.name without resume=, to begin at step 0."
                )
    return found


def _recorded_run(cfg: DictConfig, checkpoint: Path) -> tuple[Path, DictConfig] | None:
    """Return the run that a checkpoint belongs to, and the configuration of its last start."""
    run_dir = Path(cfg.run.dir)
    trained_in = run_dir if checkpoint.parent == folder(run_dir, cfg) else run_of(checkpoint)
    if trained_in is None or not (trained_in / "config.yaml").is_file():
        return None
    saved = config.load(trained_in / "config.yaml")
    config.require_groups(saved, trained_in / "config.yaml")
    return trained_in, saved


def changes_line(cfg: DictConfig, checkpoint: Path) -> str | None:
    """Return a line that names the settings which differ from those of the run's last start."""
    recorded = None if directory.is_file(checkpoint) else _recorded_run(cfg, checkpoint)
    if recorded is None:
        return None
    used = [group for group in GROUPS if group not in signatures.unused(cfg.task)]
    changed = differences(config.without_secrets(cfg), config.without_secrets(recorded[1]), used)
    named = [f"{k}={now} (was {then})" for k, (now, then) in changed.items() if k not in PER_START]
    if not named:
        return None
    notes = dict.fromkeys(NOTES.get(key.rpartition(".")[2], "") for key in changed)
    more = f" and {len(named) - 12} more" if len(named) > 12 else ""
    return (
        f"{checkpoint} was saved with other settings. From here on: {', '.join(named[:12])}"
        f"{more}.{''.join(notes)}"
    )


def differences(
    here: dict[str, Any], there: dict[str, Any], groups: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Return by key the values of two configurations in which they differ, and which may change the
    result.
    """
    now, then = (
        {k: v for group in groups for k, v in flat(each.get(group), group).items()}
        for each in (here, there)
    )
    return {
        key: (one, other)
        for key in sorted(now.keys() | then)
        if key.rpartition(".")[2] not in NO_EFFECT
        and (not key.startswith("checkpoint.") or key in ("checkpoint.monitor", "checkpoint.mode"))
        and (one := now.get(key)) != (other := then.get(key))
        and not (isinstance(one, str) and isinstance(other, str) and _is_same(one, other))
    }


def flat(value: Any, path: str) -> dict[str, Any]:
    """Return the values below `path` by their full keys; an argument that is not set has its
    constructor's default.
    """
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        value = signatures.defaults_of(str(value.get("_target_", ""))) | value
        return {
            k: v for name, inner in value.items() for k, v in flat(inner, f"{path}.{name}").items()
        }
    return {path: value}


def problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with `resume=` and `checkpoint.root=`, judged by names and sizes of
    files only.
    """
    unreachable = []
    for key, value in (("checkpoint.root", cfg.checkpoint.root), ("resume", cfg.resume)):
        if "://" in (value or ""):
            try:
                to_path(value).exists()
            except Exception as error:  # of the store's own package
                unreachable.append(f"{key}={value}: {error_line(error)}.")
    if unreachable or cfg.resume in MODES:
        return unreachable
    path, start = to_path(cfg.resume), f"resume={cfg.resume}:"
    if not path.exists():
        return [
            f"{start} no such path (and not one of {', '.join(MODES)}). To continue a "
            "run, leave resume out and type its run.name."
        ]
    if directory.is_file(path):  # Lightning's: its weights are taken
        return []
    if path.is_file():
        remedy = (
            "Convert it first: python scripts/convert.py "
            f"{cfg.resume} outputs/converted/checkpoints/step=000000."
            if path.suffix == ".safetensors"
            else "Name one of those, a run directory or a checkpoint in one."
        )
        return [
            f"{start} a file, but only one of Lightning's ({', '.join(directory.FILE_SUFFIXES)}) "
            f"can be read. {remedy}"
        ]
    checkpoint = last_checkpoint(path)
    if checkpoint is None:
        incomplete = [f" {each}: {directory.problem(each)}." for each in checkpoints_at(path)]
        return [
            f"{start} no run directory or checkpoint, or none that is complete."
            f"{''.join(incomplete)} Name a run directory, or a step=… folder in one."
        ]
    if cfg.checkpoint.trust or (problem := directory.problem(checkpoint)) is None:
        return []
    return [
        f"{checkpoint}: {problem}. Load it only if you trust its source: type "
        "checkpoint.trust=true."
    ]


def begins_anew(cfg: DictConfig) -> bool:
    """Return whether this start takes no checkpoint, whatever there is.

    `resume=never`, but for a restart of ranks.
    """
    return cfg.resume == "never" and not environment.is_restarted()


def require_used(cfg: DictConfig, run_dir: Path) -> None:
    """Raise ConfigError if `resume=PATH` names another start than the run in the directory had when
    it was last started, and will take.

    A restart or a requeue types the path that the first start has typed, though the run has newer
    checkpoints by then.
    """
    # a restart of ranks, or Slurm's requeue
    again = environment.is_restarted() or environment.number("SLURM_RESTART_COUNT", 0) > 0
    if cfg.resume in MODES or again or not (run_dir / "config.yaml").is_file():
        return
    own, typed = last_checkpoint(run_dir, cfg), to_path(cfg.resume)
    if own is None or _is_same(own, last_checkpoint(typed) or typed):
        return
    begun_with = OmegaConf.select(config.load(run_dir / "config.yaml"), "resume")
    if not _is_same(typed, str(begun_with)):
        raise ConfigError(
            f"resume={cfg.resume}: {run_dir} has checkpoints of its own and continues from {own}, "
            "not from this path. To begin with it, type another run.name; to continue the run, "
            "leave resume out."
        )


def _is_same(path: str | Path, other: str | Path) -> bool:
    """Return whether two spellings are of one path."""
    if "://" in f"{path}{other}":  # in an object store
        return str(path).rstrip("/") == str(other).rstrip("/")
    return os.path.realpath(to_path(path)) == os.path.realpath(to_path(other))


def checkpoint_for(cfg: DictConfig, run_dir: Path) -> Path | None:
    """Return the checkpoint that this start of the run resumes from, also after a restart of its
    ranks, or None.

    A run that has checkpoints, but no complete one, is an error: it must not silently start from
    step 0.
    """
    if begins_anew(cfg):
        return None
    own = last_checkpoint(run_dir, cfg)
    if own is None and (incomplete := candidates(folder(run_dir, cfg))):
        raise ConfigError(
            [
                *(f"{path}: {directory.problem(path)}." for path in incomplete),
                "None of the run's checkpoints is complete. Restore one, or type another run.name "
                "to start at step 0.",
            ]
        )
    return own or (last_checkpoint(to_path(cfg.resume)) if cfg.resume not in MODES else None)


def checkpoints_to_resume(cfg: DictConfig, run_dir: Path) -> list[Path] | ConfigError:
    """Return the checkpoints of which this start resumes from the first intact one; an error to
    raise on all ranks.
    """
    try:
        if checkpoint_for(cfg, run_dir) is None:
            return []
        return candidates(folder(run_dir, cfg)) or checkpoints_at(to_path(cfg.resume))
    except ConfigError as error:
        return error
