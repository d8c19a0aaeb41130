"""The search of `sweep=optuna`: one trial after the other, by any number of processes that were given the same command.

outputs/<run.name>/
  study.journal   what Optuna knows: values, intermediate and final results
  .locks/         one file per trial, locked by the process that runs it; the kernel unlocks those of a dead process
  0/  1/  …       one run directory per trial

A trial that is running in the study and locked by nobody was interrupted: the next start resumes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig

from armature.cli import EXIT_CONFIG
from armature.errors import ConfigError, error_line
from armature.sweeps import space
from armature.sweeps.study import journal, load_optuna, open_study, plugin_of

log = logging.getLogger(__name__)

LOCKS = ".locks"
PRUNED = "pruned"  # attribute of a trial that its callback ended
SAME_RESULT = ("run.", "launch.", "strategy", "logger", "trainer.devices", "trainer.num_nodes", "trainer.accelerator")


def run(cfg: DictConfig, settings: Mapping[str, Any], typed: list[str], *, launcher: Any) -> None:
    """Run trials until there are `trials` of them.

    Raises:
        ConfigError: a search space, sampler or pruner that cannot be used, or a sweep that was begun with another one.
        Exception: what ended a trial of this process; the others have run.
    """
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = Path(str(cfg.hydra.sweep.dir))
    parameters, fixed = space.read(settings["params"], typed)
    _check(settings, launcher)
    (folder / LOCKS).mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCKS / "study"):
        study = open_study(settings["storage"] or journal(folder), name=folder.name, mode=cfg.checkpoint.mode)
        _check_same(study, folder, cfg, parameters, fixed)
        study.set_user_attr("pruner", settings["pruner"])
    pruner = [_prune_override(settings, folder)] if settings["pruner"] else []
    failed = None
    for number, values in _trials(study, folder, parameters, settings):
        overrides = [*fixed, *(f"{each.key}={values[each.key]}" for each in parameters), *pruner]
        failed = _run_trial(study, number, overrides, launcher=launcher, monitor=cfg.checkpoint.monitor) or failed
    if failed is not None:
        raise failed


def is_hopeless(run_dir: Path, step: int, value: float, *, study: str, storage: str | None) -> bool:
    """Record a trial's value after a validation, and return whether the study's pruner would end the trial here."""
    opened = open_study(storage or journal(run_dir.parent), name=study, create=False)
    number = int(run_dir.name)
    frozen = opened.trials[number]
    opened.pruner = plugin_of("pruner", opened.user_attrs["pruner"])
    trial = load_optuna().Trial(opened, frozen._trial_id)
    if step not in frozen.intermediate_values:  # a resumed trial may repeat a validation
        trial.report(value, step)
    hopeless = trial.should_prune()
    if hopeless:
        trial.set_user_attr(PRUNED, step)
    return hopeless


def _run_trial(study: Any, number: int, overrides: list[str], *, launcher: Any, monitor: str) -> Exception | None:
    """Run one trial and tell Optuna its result. Return the error that ended it; a signal ends the sweep."""
    TrialState = load_optuna().trial.TrialState
    try:
        (job,) = launcher.launch([overrides], initial_job_idx=number)
        value = job.return_value
    except Exception as error:
        log.warning("trial %s failed: %s", number, error_line(error))
        study.tell(number, state=TrialState.FAIL)
        return error
    except SystemExit as end:
        if end.code != EXIT_CONFIG:  # stopped by a signal: the next start resumes it
            raise
        study.tell(number, state=TrialState.FAIL)  # these values cannot be combined, and the message said why
        if not any(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False)):
            raise
        return None
    if study.trials[number].user_attrs.get(PRUNED) is not None:
        study.tell(number, state=TrialState.PRUNED)
    elif value is None:
        study.tell(number, state=TrialState.FAIL)
        log.warning("trial %s has no %s (checkpoint.monitor), so it counts as failed.", number, monitor)
    else:
        study.tell(number, value)
    return None


def _trials(
    study: Any, folder: Path, parameters: list[space.Parameter], settings: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the interrupted trials and then new ones, each locked while the caller runs it."""
    TrialState = load_optuna().trial.TrialState
    study_lock = FileLock(folder / LOCKS / "study")
    while True:
        with study_lock:
            trials = study.get_trials(deepcopy=False)
            running = [trial for trial in trials if trial.state == TrialState.RUNNING]
            found = next(((each, lock) for each in running if (lock := _claimed(folder, each.number))), None)
            if found is None and len(trials) < settings["trials"]:
                study.sampler = _sampler(settings["sampler"], number=len(trials))
                trial = study.ask({each.key: each.distribution() for each in parameters})
                lock = _claimed(folder, trial.number)
                assert lock is not None  # nobody else knows this trial yet
                found = trial, lock
        if found is None:
            if running:
                numbers = ", ".join(str(trial.number) for trial in running)
                log.info("Other processes still run trial %s of %s.", numbers, folder)
            return
        trial, lock = found
        try:
            yield trial.number, trial.params
        finally:
            lock.release()


def _claimed(folder: Path, number: int) -> FileLock | None:
    """Return the trial's lock if no process holds it."""
    lock = FileLock(folder / LOCKS / str(number))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def _sampler(node: Mapping[str, Any], *, number: int) -> Any:
    """Return the sampler for one trial, whose seed depends on its number: no two processes draw the same values."""
    seed = node.get("seed")
    return plugin_of("sampler", {**node, "seed": None if seed is None else seed + number} if "seed" in node else node)


def _prune_override(settings: Mapping[str, Any], folder: Path) -> str:
    where = f",storage:'{settings['storage']}'" if settings["storage"] else ""
    target = "_target_:armature.callbacks.prune.Prune"
    return f"+callbacks.prune={{{target},monitor:'${{checkpoint.monitor}}',study:'{folder.name}'{where}}}"


def _check(settings: Mapping[str, Any], launcher: Any) -> None:
    problems = []
    if not isinstance(settings["trials"], int) or settings["trials"] < 1:
        problems.append(f"hydra.sweeper.trials={settings['trials']}: type a whole number of at least 1.")
    if type(launcher).__name__ != "BasicLauncher":
        problems.append(
            f"hydra/launcher: sweep=optuna runs one trial after the other and does not use {type(launcher).__name__}. "
            "Leave it out, and start the same command several times for several trials at once."
        )
    for kind in ("sampler", "pruner"):
        if settings[kind]:
            try:
                plugin_of(kind, settings[kind])
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)


def _check_same(study: Any, folder: Path, cfg: DictConfig, parameters: list[space.Parameter], fixed: list[str]) -> None:
    """Record what the sweep tries. ConfigError: an earlier start of it tried something else."""
    kept = sorted(each for each in fixed if not each.startswith(SAME_RESULT))
    here = {
        "values": [each.text for each in parameters],
        "overrides": kept,
        "metric": f"{cfg.checkpoint.monitor} ({cfg.checkpoint.mode})",
    }
    there = study.user_attrs.get("begun")
    if there is None:
        study.set_user_attr("begun", here)
        return
    problems = [
        f"{folder} was begun with other {key}: {_shown(there[key])} there, {_shown(here[key])} here. "
        "Type another run.name."
        for key in here
        if there[key] != here[key]
    ]
    if problems:
        raise ConfigError(problems)


def _shown(value: Any) -> str:
    return " ".join(value) or "none" if isinstance(value, list) else value
