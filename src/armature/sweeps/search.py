"""The search of `sweep=optuna`, by any number of processes that were given the same command.

outputs/<run.name>/
  study.journal   what Optuna knows: values, intermediate and final results
  .claims/        one lease per trial, of the process that runs it
  0/  1/  …       one run directory per trial

A trial that is running in the study and claimed by nobody was interrupted: the next start resumes
it, or records it as failed if it was interrupted before it had values.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from omegaconf import DictConfig

from armature.errors import EXIT_CONFIG, ConfigError, error_line
from armature.launcher import environment, lock, slurm
from armature.sweeps import pool, space
from armature.sweeps.study import load_optuna, open_study, plugin_of

log = logging.getLogger(__name__)

HOPELESS = 5  # so many trials, all of them failed, end the search
PRUNE = "+callbacks.prune={_target_:armature.callbacks.prune.Prune,monitor:'${checkpoint.monitor}'}"
PRUNED = "pruned"  # attribute of a trial that its callback ended: the step
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
        RunFailed: what ended trials of this process; the others have run.
    """
    optuna = load_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = Path(str(cfg.hydra.sweep.dir))
    parameters, fixed = space.read(settings["params"], typed)
    _check(settings, launcher)
    (folder / pool.CLAIMS).mkdir(parents=True, exist_ok=True)
    with FileLock(folder / pool.CLAIMS / "study"):
        study = open_study(folder, mode=cfg.checkpoint.mode)
        _check_same(study, folder, cfg, parameters, fixed)
        study.set_user_attr("pruner", settings["pruner"])
    pruner = [PRUNE] if settings["pruner"] else []
    failed = []

    def typed_for(number: int, values: Mapping[str, Any]) -> list[str]:
        return [*fixed, *(f"{each.key}={values[each.key]}" for each in parameters), *pruner]

    trials = _trials(study, folder, parameters, settings, typed_for)
    for result in launcher.results(trials, asked=settings["trials"]):
        _tell(study, folder, result, monitor=cfg.checkpoint.monitor)
        if result.is_refused and _is_in_vain(study, least=min(HOPELESS, settings["trials"])):
            sys.exit(EXIT_CONFIG)  # no values work
        if result.error and not result.is_refused:
            failed.append(result)
    pool.raise_failed(failed, settings["trials"])


def is_hopeless(run_dir: Path, step: int, value: float) -> bool:
    """Record a trial's value after a validation, and return whether the study's pruner would end
    the trial here.
    """
    opened = open_study(run_dir.parent)
    frozen = opened.trials[int(run_dir.name)]
    # a signal came between this answer and the trial's end, and it may resume from before that step
    if PRUNED in frozen.user_attrs:
        return step >= frozen.user_attrs[PRUNED]
    trial = load_optuna().Trial(opened, frozen._trial_id)
    if step not in frozen.intermediate_values:  # a resumed trial may repeat a validation
        trial.report(value, step)
    if not opened.user_attrs["pruner"]:  # another process of the search has turned it off
        return False
    opened.pruner = plugin_of("pruner", opened.user_attrs["pruner"])
    if hopeless := trial.should_prune():
        trial.set_user_attr(PRUNED, step)
    return hopeless


def _tell(study: Any, folder: Path, result: pool.Result, *, monitor: str) -> None:
    """Tell Optuna how a trial has ended. One that a signal ended is resumed by a next start."""
    TrialState, number = load_optuna().trial.TrialState, result.trial.number
    if result.is_resumable:
        return
    if PRUNED in study.trials[number].user_attrs and result.error is None:
        study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
    elif result.metric is not None:
        study.tell(number, result.metric, skip_if_finished=True)
    elif lock.is_held(folder / str(number)):
        log.warning("trial %s is left to the process that runs it.", number)
    else:
        lacking = f"it has no {monitor} (checkpoint.monitor)"
        why = error_line(result.error) if result.error else lacking
        log.warning("trial %s counts as failed: %s", number, why)
        study.tell(number, state=TrialState.FAIL, skip_if_finished=True)


def _is_in_vain(study: Any, *, least: int) -> bool:
    """Return whether all trials have failed, and there are at least so many."""
    trials = study.get_trials(deepcopy=False)
    failed = load_optuna().trial.TrialState.FAIL
    return len(trials) >= least and all(trial.state == failed for trial in trials)


def _trials(
    study: Any, folder: Path, parameters: list[space.Parameter], settings: Mapping[str, Any],
    typed_for: Callable[[int, Mapping[str, Any]], list[str]],
) -> Iterator[pool.Trial]:  # fmt: skip
    """Yield the interrupted trials and then new ones, each claimed, and none twice."""
    TrialState = load_optuna().trial.TrialState
    study_lock = FileLock(folder / pool.CLAIMS / "study")
    distributions = {each.key: each.distribution for each in parameters}
    mine: set[int] = set()
    while True:
        with study_lock:  # no other process is between asking for a trial and giving it values
            found = _interrupted(study, folder, distributions.keys(), mine)
            trials = study.get_trials(deepcopy=False)
            begun = [trial for trial in trials if distributions.keys() <= trial.params.keys()]
            study.sampler = _sampler(settings["sampler"], number=len(trials))
            if found is None and len(begun) < settings["trials"]:
                trial = study.ask(distributions)
                claim = pool.claim(folder, trial.number)
                assert claim is not None  # nobody else knows this trial yet
                found = trial, claim
        if found is None:
            running = {each.number for each in begun if each.state == TrialState.RUNNING}
            if others := ", ".join(map(str, sorted(running - mine))):
                log.info("Other processes still run trial %s of %s.", others, folder)
            return
        trial, claim = found
        mine.add(trial.number)
        yield pool.Trial(trial.number, typed_for(trial.number, trial.params), claim)


def _interrupted(
    study: Any, folder: Path, keys: Any, mine: set[int]
) -> tuple[Any, lock.Lock] | None:
    """Claim and return a trial that no process runs, and that this one has not run.

    One whose process ended before it had values counts as failed.
    """
    TrialState = load_optuna().trial.TrialState
    for seen in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        claim = None if seen.number in mine else pool.claim(folder, seen.number)
        if claim is None:
            continue
        trial = study.get_trials(deepcopy=False)[seen.number]
        # else its process told the result before it released the trial
        if trial.state == TrialState.RUNNING:
            if keys <= trial.params.keys():
                return trial, claim
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        claim.release()
    return None


def _sampler(node: Mapping[str, Any], *, number: int) -> Any:
    """Return the sampler for one trial, whose seed depends on its number: no two processes draw the
    same values.
    """
    seed = node.get("seed")
    # a low-discrepancy sequence is one sequence
    if seed is None or node.get("name") == "QMCSampler":
        return plugin_of("sampler", node)
    return plugin_of("sampler", {**node, "seed": seed + number})


def _check(settings: Mapping[str, Any], launcher: Any) -> None:
    problems = []
    if settings["trials"] < 1:
        problems.append(f"hydra.sweeper.trials={settings['trials']}: type 1 or more.")
    if type(launcher).__name__ != "TrialLauncher":
        problems.append(
            f"hydra/launcher: sweep=optuna does not use {type(launcher).__name__}. Leave it out, "
            "and type sweep.parallel=auto for several trials at once."
        )
    elif (
        launcher.config.sweep.parallel == 1
        and (ranks := max(environment.world_size(), slurm.tasks())) > 1
    ):
        problems.append(
            f"sweep=optuna was started as {ranks} ranks, and each of them would search for itself. "
            "Start it as one task: strategy= and trainer.devices= start each trial's ranks. Type "
            "sweep.parallel=auto for one task per machine that share the search."
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
    here = {
        "values": [each.text for each in parameters],
        "overrides": sorted(each for each in fixed if not each.startswith(SAME_RESULT)),
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
