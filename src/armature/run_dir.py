"""The run directory: one for all ranks, restarts and requeues of a run.

outputs/<run.name>/
  config.yaml      composed; references to other keys and to the environment are kept
  overrides.txt    the typed overrides
  checkpoints/     step=000120/ …, and `last`, which names the newest complete one
  metrics.csv      one row per optimizer step, with val/* and test/* values in the row of their step
  summary.json     written when the run ends
  report.html      all of it on one page (run.report)
  report.jsonl     the samples of that page
  not_finite.json  steps whose loss or gradient was not finite, if there were any
  logs/            one file per rank
  tokenizer.json   for a language model
  classes.json     for classes with names: in the order of their numbers
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from armature import config, files, project
from armature.checkpoint import directory, resume
from armature.errors import ConfigError, NotSaved
from armature.finetune import check as pretrained
from armature.finetune import folder as folders
from armature.launcher import environment, run_state, slurm
from armature.validation.overrides import keep_references

log = logging.getLogger(__name__)
TRACE = "trace"  # the folder of what callbacks/trace.py records
# values of run.root that did not exist when this process decided on a run directory
_new_roots: set[Path] = set()
# by file of the run directory: what it was before this start, and the last checkpoint then
_replaced: dict[Path, tuple[str, Path | None]] = {}


def default_name(label: str) -> str:
    """Return the Slurm job's id under Slurm, else `label` and the time at which the run was
    started.

    In an interactive job a command typed again is another run, as outside of Slurm; tasks of one
    step have no other name in common than the step's.
    """
    names = ["SLURM_JOB_ID"]
    if os.environ.get("SLURM_ARRAY_JOB_ID"):
        names = ["SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"]
    elif os.environ.get("SLURM_JOB_NAME") in ("interactive", "bash"):  # of salloc, srun --pty bash
        names = ["SLURM_JOB_ID", "SLURM_STEP_ID"] if slurm.tasks() > 1 else []
    if ids := [*filter(None, map(os.environ.get, names))]:
        return "_".join(ids)
    # under torchrun, the launcher's start time is the same for all ranks and all restarts
    started = (
        psutil.Process(os.getppid()).create_time() if environment.is_under_agent() else time.time()
    )
    return f"{label}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}"


def decide(cfg: DictConfig, *, label: str, trial: str | None = None) -> DictConfig:
    """Return the configuration with run.name and run.dir set.

    Args:
        label: the experiment's name, used if run.name is null.
        trial: `<sweep>/<number>` for a trial of a sweep, which has its own directory.
    """
    cfg = cfg.copy()
    cfg.run.root = os.path.expanduser(cfg.run.root)  # a shell leaves the ~ of key=~/… as it is
    root = Path(cfg.run.root)
    if not root.exists():
        _new_roots.add(root)
    named = trial or cfg.run.name
    name = named or default_name(label)
    if not named and "-" in name and not environment.is_joined():  # not named after a job
        if cfg.launch.rdzv_endpoint:
            raise ConfigError(
                f"launch.rdzv_endpoint={cfg.launch.rdzv_endpoint}: all machines need one run "
                "directory, or they never meet. Type run.name=NAME, the same on each."
            )
        taken, number = name, 2
        while not _claim(root / name):
            name, number = f"{taken}-{number}", number + 1
    cfg.run.name, cfg.run.dir = name, str(root / name)
    checkpoints = OmegaConf.select(cfg, "checkpoint.root")
    if checkpoints and checkpoints.startswith("~"):
        cfg.checkpoint.root = os.path.expanduser(checkpoints)
    elif checkpoints and "://" not in checkpoints and not os.path.isabs(checkpoints):
        # the run may be loaded from another folder
        kept = str(config.unresolved(cfg.checkpoint)["root"])
        cfg.checkpoint.root = os.path.join(os.getcwd(), kept)
    if trial is not None and cfg.run.group is None:
        cfg.run.group = trial.rpartition("/")[0]  # the sweep's name
    return cfg


def _claim(folder: Path) -> bool:
    """Create a run directory.

    Return False if there is one: several commands may start within a second.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return folder.parent.is_file()  # `write` reports it
    except OSError:
        pass  # `write` reports it
    return True


def release(cfg: DictConfig) -> None:
    """Undo what `write` and `decide` have done, if the command is refused: remove the directories
    that are empty, and put back the files of a run that has no new checkpoint.
    """
    root = Path(cfg.run.root)
    for file, (text, checkpoint) in _replaced.items():
        with contextlib.suppress(OSError):
            own = file.parent == Path(cfg.run.dir)  # not of the sweep's trial before
            if own and checkpoint == resume.last_checkpoint(file.parent, cfg):
                files.replace(file, text)
    for folder in (Path(cfg.run.dir), *([root] if root in _new_roots else [])):
        with contextlib.suppress(OSError):
            folder.rmdir()


def write(cfg: DictConfig, overrides: list[str]) -> Path:
    """Create the directory with config.yaml and overrides.txt; a later start appends its overrides.

    If the directory, or the run that `resume=PATH` names, does not match, nothing is changed and
    ConfigError is raised.
    """
    run_dir = Path(cfg.run.dir)
    resume.require_used(cfg, run_dir)
    checkpoint = resume.checkpoint_for(cfg, run_dir)
    if checkpoint is None and cfg.resume == "required":
        raise ConfigError(
            f"resume=required: {run_dir} holds no complete checkpoint. Type another run.name or "
            "resume=auto."
        )
    if checkpoint is not None and (problems := resume.mismatches(cfg, checkpoint)):
        raise ConfigError(problems)
    changed = None if checkpoint is None else resume.changes_line(cfg, checkpoint)
    if resume.begins_anew(cfg):
        # may be elsewhere
        own, checkpoints = directory.folder_of(run_dir).exists(), resume.folder(run_dir, cfg)
        if own or directory.checkpoints_in(checkpoints):
            raise ConfigError(
                f"resume=never: {run_dir if own else checkpoints} holds a run already. Type "
                "another run.name, or resume=auto to resume it."
            )
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{run_dir} cannot be created ({error.strerror})"
        raise ConfigError(
            f"run.root={cfg.run.root}: {why}. Type another run.root or run.name."
        ) from error
    cfg.run.id, cfg.run.git = _id(run_dir), git()
    kept = keep_references(config.unresolved(cfg), config.without_secrets(cfg))
    typed = run_dir / "overrides.txt"
    last = resume.last_checkpoint(run_dir, cfg)
    _replaced.clear()
    for file in (run_dir / "config.yaml", typed):
        if file.is_file():
            _replaced[file] = file.read_text("utf-8", "replace"), last
    before = typed.read_text(encoding="utf-8", errors="replace") + "\n" if typed.is_file() else ""
    try:
        files.clear_parts(run_dir)
        if (base := pretrained.named_by(cfg)) is not None:
            folders.keep(folders.find(base), run_dir, anew=checkpoint is None)
        files.replace(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(kept)))
        files.replace(typed, before + "".join(f"{override}\n" for override in overrides))
    except OSError as error:
        why = f"{run_dir} cannot be written ({error.strerror or error})"
        raise ConfigError(
            f"run.root={cfg.run.root}: {why}. Make room there, or type another run.root."
        ) from error
    if changed is not None:
        log.info("%s", changed)
    return run_dir


def _id(run_dir: Path) -> str:
    """Return the run's id for loggers: random at its first start, the same at every later one."""
    file = run_dir / "config.yaml"
    known = OmegaConf.select(config.load(file), "run.id", default=None) if file.is_file() else None
    return known or secrets.token_hex(6)


@functools.cache
def git() -> dict[str, Any] | None:
    """Return the commit of the code, and whether a tracked file was changed since; None outside of
    a repository.

    Asked once: a sweep's later trials run the code that this process has imported.
    """
    command = [
        "git",
        "--no-optional-locks",
        "status",
        "--porcelain=v2",
        "--branch",
        "--untracked-files=no",
    ]
    try:
        text = subprocess.run(
            command,
            cwd=project.ROOT,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    head, *changes = text.stdout.splitlines()
    return {"commit": head.split()[-1], "dirty": any(not line.startswith("#") for line in changes)}


def fingerprint(cfg: DictConfig) -> str:
    """Return a hash of what is trained and how: the same for every start of a run that was not
    changed.
    """
    kept = {
        key: value
        for key, value in config.without_secrets(cfg).items()
        if key not in ("run", "launch", "resume")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def record_micro_batch_size(run_dir: Path, size: int) -> None:
    """Write into config.yaml what `data.micro_batch_size=auto` is from now on."""
    cfg = read(run_dir)
    cfg.run.micro_batch_size = size
    files.replace(run_dir / "config.yaml", OmegaConf.to_yaml(cfg))


def read(run_dir: Path) -> DictConfig:
    """Return the configuration of a run; references to the environment are resolved when they are
    used.
    """
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{run_dir}: not a run directory (it holds no config.yaml). Type outputs/<run.name>."
        )
    return config.load(file)


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    file = run_dir / "summary.json"
    try:
        files.replace(
            file,
            json.dumps(summary | {run_state.TYPED: run_state.typed_bytes(run_dir)}, indent=2)
            + "\n",
        )
    except OSError as error:
        raise NotSaved(
            f"{file} could not be written ({error.strerror or error}), so the run does not count "
            "as finished. Once there is room, type the same command with its run.name."
        ) from error
