"""The search of `sweep=optuna` in this process, with a launcher whose trials only return their
metric.
"""

from typing import Any

import pytest
from hydra import compose

from armature import errors
from armature.errors import ConfigError
from armature.sweeps import pool, search, study
from armature.validation.composing import composing
from hydra_plugins.armature_sweeps import OptunaSweeper
from tests.launcher.test_lock import write

optuna = pytest.importorskip("optuna")
SETTINGS = {
    "trials": 3,
    "sampler": {"name": "RandomSampler", "seed": 0},
    "pruner": None,
}
SETTINGS["params"] = {"optimizer.lr": "interval(0.1,0.5)"}


class TrialLauncher:
    """Named as ours."""

    def __init__(self, *results, cfg):
        self.outcomes, self.begun, self.config = [*results], [], cfg

    def results(self, trials, *, asked):
        for trial in trials:
            self.begun.append((trial.number, trial.overrides))
            outcome = self.outcomes.pop(0) if self.outcomes else 0.5
            try:
                outcome = outcome() if callable(outcome) else outcome
                if isinstance(outcome, Exception):
                    yield pool.Result(trial, error=outcome)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    yield pool.Result(trial, outcome)
            finally:
                trial.claim.release()


REFUSED = errors.RunFailed("refused", errors.EXIT_CONFIG)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "outputs" / "search"


def begin(*results, typed=(), **settings) -> TrialLauncher:
    with composing():
        cfg = compose(
            "train", ["sweep=optuna", "run.name=search", *typed], return_hydra_config=True
        )
    launcher = TrialLauncher(*results, cfg=cfg)
    sweeper: Any = OptunaSweeper(**{**SETTINGS, **settings})
    sweeper.config, sweeper.launcher = cfg, launcher
    sweeper.sweep([])
    return launcher


opened = study.open_study


def states(folder) -> list[str]:
    return [trial.state.name for trial in opened(folder).trials]


def hold(folder, number) -> None:
    """Lock a run directory as a process of another machine does."""
    run_dir = folder / str(number)
    run_dir.mkdir(parents=True, exist_ok=True)
    write(run_dir, host="elsewhere")


def test_a_trial_that_ended_before_it_had_values_fails_and_does_not_count(folder):
    begin(0.5, trials=1)
    opened(folder).ask()
    launcher = begin(trials=3)
    assert [number for number, _ in launcher.begun] == [2, 3]
    assert states(folder) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert begin(trials=3).begun == []


def test_an_interrupted_trial_is_resumed_with_its_values(folder):
    with pytest.raises(KeyboardInterrupt):
        begin(KeyboardInterrupt(), trials=2)
    moved = folder.rename(folder.with_name("moved"))
    values = opened(moved).trials[0].params
    moved.rename(folder)
    journal = folder / study.JOURNAL
    journal.write_text(journal.read_text() + "torn")  # as by a full disk
    launcher = begin(trials=2)
    assert [number for number, _ in launcher.begun] == [0, 1]
    assert f"optimizer.lr={values['optimizer.lr']}" in launcher.begun[0][1]


def test_a_trial_that_a_signal_ended_is_left_to_the_next_start(folder):
    killed = errors.RunFailed("killed by SIGKILL", -9)
    with pytest.raises(errors.RunFailed, match="1 of 2 trials failed:\n  trial 0: killed"):
        begin(killed, trials=2)
    assert states(folder) == ["RUNNING", "COMPLETE"]
    assert [number for number, _ in begin(trials=2).begun] == [0]
    assert states(folder) == ["COMPLETE"] * 2


def test_a_result_of_a_trial_that_has_one_is_not_an_error(folder):
    def told_by_another_process():
        opened(folder).tell(0, 0.7)
        return 0.6

    begin(told_by_another_process, trials=1)
    assert [trial.value for trial in opened(folder).trials] == [0.7]


def test_a_trial_whose_run_directory_another_machine_holds_is_left_to_it(folder):
    with pytest.raises(KeyboardInterrupt):
        begin(KeyboardInterrupt(), trials=1)
    hold(folder, 0)
    assert begin(trials=1).begun == []

    def refused_by_the_lock():
        hold(folder, 1)
        return REFUSED

    begin(refused_by_the_lock, trials=2)
    assert states(folder) == ["RUNNING", "RUNNING"]


def test_a_search_that_is_started_as_ranks_is_refused(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"started as 4 ranks.*Start it as one task"):
        begin()
    assert not folder.exists()


def test_values_that_cannot_be_combined_do_not_stop_the_search(folder):
    begin(*[REFUSED] * 4, 0.5, trials=6)
    assert states(folder) == ["FAIL"] * 4 + ["COMPLETE"] * 2


@pytest.mark.parametrize(("trials", "failed"), [(20, 5), (2, 2)])
def test_a_search_whose_trials_all_fail_ends(trials, failed, folder):
    with pytest.raises(SystemExit) as end:
        begin(*[REFUSED] * 20, trials=trials)
    assert end.value.code == 2
    assert states(folder) == ["FAIL"] * failed


def test_a_trial_that_was_stopped_after_it_was_pruned_is_pruned_when_it_is_resumed(folder):
    asked = []

    def stopped():
        asked.append(search.is_hopeless(folder / "0", 2, 0.1))
        raise SystemExit(143)

    pruner = {"name": "ThresholdPruner", "lower": 0.3}
    with pytest.raises(SystemExit):
        begin(stopped, trials=1, pruner=pruner)

    def resumed():
        # from a checkpoint of before that validation
        asked.extend(search.is_hopeless(folder / "0", step, 0.9) for step in (1, 2))
        return 0.9

    begin(resumed, trials=1, pruner=pruner)
    assert asked == [True, False, True]
    assert states(folder) == ["PRUNED"]


def test_each_trial_draws_by_a_seed_of_its_own_unless_they_are_one_sequence(monkeypatch):
    monkeypatch.setattr(search, "plugin_of", lambda kind, node: node["seed"])
    names = {"TPESampler": 3, "QMCSampler": 0}
    for name, seed in names.items():
        assert search._sampler({"name": name, "seed": 0}, number=3) == seed
