"""The search of `sweep=optuna`: one trial after the other, by any number of processes that were
given the same command.

outputs/<run.name>/
  study.journal   what Optuna knows: values, intermediate and final results
  .locks/         one file per trial, locked by the process that runs it; the kernel unlocks those
                  of a dead process
  0/  1/  …       one run directory per trial

A trial that is running in the study and locked by nobody was interrupted: the next start resumes
it, or records it as failed if it was interrupted before it had values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from armature.errors import EXIT_CONFIG, ConfigError, error_line
from armature.launcher import environment, lock, slurm
from armature.sweeps import space
from armature.sweeps.study import journal, load_optuna, open_study, plugin_of

log = logging.getLogger(__name__)

LOCKS = ".locks"
MOST_TRIALS = 1_000_000  # each has a directory
HOPELESS = 5  # so many trials, all of them failed, end the search
PRUNED = "pruned"  # attribute of a trial that its callback ended
EXHAUSTED = "exhausted"  # attribute of a study: the sampler that has tried all its values
SAME_RESULT = (
    "run.",
    "launch.",
    "strategy",
    "logger",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
)


def run(cfg: DictConfig, settings: Mapping[str, Any], typed: list[str], *, launcher: Any) -> None:
    """Run trials until there are `trials` of them.

    Raises:
        ConfigError: a search space, sampler or pruner that cannot be used, or a sweep that was
            begun with another one.
        Exception: what ended a trial of this process; the others have run.
    """
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = Path(str(cfg.hydra.sweep.dir))
    parameters, fixed = space.read(settings["params"], typed)
    _check(settings, launcher)
    (folder / LOCKS).mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCKS / "study"):
        study = open_study(
            settings["storage"] or journal(folder), name=folder.name, mode=cfg.checkpoint.mode
        )
        _check_same(study, folder, cfg, parameters, fixed)
        study.set_user_attr("pruner", settings["pruner"])
    # GridSampler and BruteForceSampler call it at their last values; Optuna's own works inside
    # study.optimize only
    study.stop = lambda: study.set_user_attr(EXHAUSTED, settings["sampler"])
    unresolved: Any = OmegaConf.to_container(cfg.hydra.sweeper, resolve=False)
    pruner = [_prune_override(unresolved["storage"], folder)] if settings["pruner"] else []
    failed = None
    for number, values in _trials(study, folder, parameters, settings):
        overrides = [*fixed, *(f"{each.key}={values[each.key]}" for each in parameters), *pruner]
        try:
            error = _run_trial(
                study, folder, number, overrides, launcher=launcher, monitor=cfg.checkpoint.monitor
            )
        except SystemExit as end:
            if end.code != EXIT_CONFIG or _is_in_vain(
                study, least=min(HOPELESS, settings["trials"])
            ):
                raise  # for a signal, or because no values work
            continue
        failed = error or failed
    if failed is not None:
        raise failed


def is_hopeless(run_dir: Path, step: int, value: float, *, study: str, storage: str | None) -> bool:
    """Record a trial's value after a validation, and return whether the study's pruner would end
    the trial here.
    """
    opened = open_study(storage or journal(run_dir.parent), name=study, create=False)
    number = int(run_dir.name)
    frozen = opened.trials[number]
    if PRUNED in frozen.user_attrs:  # a signal came between this answer and the trial's end
        return True
    trial = load_optuna().Trial(opened, frozen._trial_id)
    if step not in frozen.intermediate_values:  # a resumed trial may repeat a validation
        trial.report(value, step)
    if opened.user_attrs["pruner"] is None:  # another process of the search has turned it off
        return False
    opened.pruner = plugin_of("pruner", opened.user_attrs["pruner"])
    hopeless = trial.should_prune()
    if hopeless:
        trial.set_user_attr(PRUNED, step)
    return hopeless


def _run_trial(
    study: Any, folder: Path, number: int, overrides: list[str], *, launcher: Any, monitor: str
) -> Exception | None:
    """Run one trial and tell Optuna its result. Return the error that ended it.

    Raises:
        SystemExit: its values were refused, or a signal stopped it: then the next start resumes it.
    """
    TrialState = load_optuna().trial.TrialState
    try:
        (job,) = launcher.launch([overrides], initial_job_idx=number)
        value = job.return_value
    except Exception as error:
        log.warning("trial %s failed: %s", number, error_line(error))
        _record_failure(study, folder, number)
        return error
    except SystemExit as end:
        if end.code == EXIT_CONFIG:
            _record_failure(study, folder, number)
        raise
    if study.trials[number].user_attrs.get(PRUNED) is not None:
        study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
    elif value is None:
        _record_failure(study, folder, number)
        log.warning(
            "trial %s has no %s (checkpoint.monitor), so it counts as failed.", number, monitor
        )
    else:
        study.tell(number, value, skip_if_finished=True)
    return None


def _record_failure(study: Any, folder: Path, number: int) -> None:
    if lock.is_held(folder / str(number)):
        log.warning("trial %s is left to the process that runs it.", number)
        return
    study.tell(number, state=load_optuna().trial.TrialState.FAIL, skip_if_finished=True)


def _is_in_vain(study: Any, *, least: int) -> bool:
    """Return whether all trials have failed, and there are at least so many."""
    trials = study.get_trials(deepcopy=False)
    failed = load_optuna().trial.TrialState.FAIL
    return len(trials) >= least and all(trial.state == failed for trial in trials)


def _trials(
    study: Any, folder: Path, parameters: list[space.Parameter], settings: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the interrupted trials and then new ones, each locked while the caller runs it."""
    TrialState = load_optuna().trial.TrialState
    study_lock = FileLock(folder / LOCKS / "study")
    distributions = {each.key: each.distribution() for each in parameters}
    while True:
        with study_lock:  # no other process is between asking for a trial and giving it values
            found = _interrupted(study, folder, [*distributions])
            trials = study.get_trials(deepcopy=False)
            begun = [trial for trial in trials if distributions.keys() <= trial.params.keys()]
            exhausted = study.user_attrs.get(EXHAUSTED) == settings["sampler"]
            # else these samplers would repeat a combination that another process still runs
            all_begun = exhausted or space.all_tried(
                parameters, settings["sampler"], [each.params for each in begun]
            )
            # it also ends a resumed trial
            study.sampler = _sampler(settings["sampler"], number=len(trials))
            if found is None and len(begun) < settings["trials"] and not all_begun:
                trial = study.ask(distributions)
                claim = _claimed(folder, trial.number)
                assert claim is not None  # nobody else knows this trial yet
                found = trial, claim
        if found is None:
            if running := [
                str(trial.number) for trial in begun if trial.state == TrialState.RUNNING
            ]:
                log.info("Other processes still run trial %s of %s.", ", ".join(running), folder)
            if exhausted and len(begun) < settings["trials"]:
                log.info(
                    "%s has tried all values, in %s trials.",
                    settings["sampler"]["name"],
                    len(begun),
                )
            return
        trial, claim = found
        try:
            yield trial.number, trial.params
        finally:
            claim.release()


def _interrupted(study: Any, folder: Path, keys: list[str]) -> tuple[Any, FileLock] | None:
    """Claim and return a trial that no process runs.

    One whose process ended before it had values counts as failed.
    """
    TrialState = load_optuna().trial.TrialState
    for seen in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        claim = _claimed(folder, seen.number)
        if claim is None:
            continue
        trial = study.get_trials(deepcopy=False)[seen.number]
        # else its process told the result before it released the trial
        if trial.state == TrialState.RUNNING:
            if any(key not in trial.params for key in keys):
                study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            elif not lock.is_held(folder / str(trial.number)):
                # by a machine that does not see claims
                return trial, claim
        claim.release()
    return None


def _claimed(folder: Path, number: int) -> FileLock | None:
    """Return the trial's lock if no process holds it."""
    claim = FileLock(folder / LOCKS / str(number))
    try:
        claim.acquire(timeout=0)
    except Timeout:
        return None
    return claim


def _sampler(node: Mapping[str, Any], *, number: int) -> Any:
    """Return the sampler for one trial, whose seed depends on its number: no two processes draw the
    same values.
    """
    seed, name = node.get("seed"), node.get("name")
    if seed is None or name == "GridSampler":
        return plugin_of("sampler", node)
    # another sampler draws what is not in its sequence yet: values of the first trials
    if name == "QMCSampler":
        first = plugin_of("sampler", {"name": "RandomSampler", "seed": seed + number})
        return plugin_of("sampler", {"independent_sampler": first, **node})
    return plugin_of("sampler", {**node, "seed": seed + number})


def _prune_override(storage: str | None, folder: Path) -> str:
    """Return the override for a trial.

    Each trial's files show it, so `storage` may refer to the environment.
    """
    # a reference with escaped quotes is none to OmegaConf
    quote = '"' if "'" in (storage or "") else "'"
    where = f",storage:{quote}{storage}{quote}" if storage else ""
    values = f"monitor:'${{checkpoint.monitor}}',study:'{folder.name}'{where}"
    return f"+callbacks.prune={{_target_:armature.callbacks.prune.Prune,{values}}}"


def _check(settings: Mapping[str, Any], launcher: Any) -> None:
    problems = []
    if not isinstance(settings["trials"], int) or not 1 <= settings["trials"] <= MOST_TRIALS:
        problems.append(
            f"hydra.sweeper.trials={settings['trials']}: type a whole number from 1 to "
            f"{MOST_TRIALS:,}."
        )
    if type(launcher).__name__ != "BasicLauncher":
        problems.append(
            "hydra/launcher: sweep=optuna runs one trial after the other and does not use "
            f"{type(launcher).__name__}. "
            "Leave it out, and start the same command several times for several trials at once."
        )
    if (ranks := max(environment.world_size(), slurm.tasks())) > 1:
        problems.append(
            f"sweep=optuna was started as {ranks} ranks, and each of them would search for itself. "
            "Start it as one "
            "task: strategy= and trainer.devices= start each trial's ranks."
        )
    for kind in ("sampler", "pruner"):
        if settings[kind]:
            try:
                plugin_of(kind, settings[kind])
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)


def _check_same(
    study: Any, folder: Path, cfg: DictConfig, parameters: list[space.Parameter], fixed: list[str]
) -> None:
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
        f"{folder} was begun with other {key}: {_shown(there[key])} there, {_shown(here[key])} "
        "here. "
        "Type another run.name."
        for key in here
        if there[key] != here[key]
    ]
    if problems:
        raise ConfigError(problems)


def _shown(value: Any) -> str:
    return " ".join(value) or "none" if isinstance(value, list) else value
