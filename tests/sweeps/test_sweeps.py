"""Sweeps: a search with Optuna, the ranked table and report of every sweep, joblib, submitit, and
agents of W&B.
"""

import csv
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from armature import cli
from armature.errors import ConfigError, RunFailed
from armature.sweeps import conclude, report, space, study, trials
from armature.validation.compose import explain_sweep
from armature.validation.composing import composing
from tests import running

TRAIN = [sys.executable, str(running.ROOT / "train.py")]
SMALL = [
    "experiment=example",
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=null",
    "trainer.max_steps=8",
    "trainer.val_every_n_steps=2",
    "trainer.test_at_end=false",
    "model.width=8",
    "model.layers=1",
    "data.samples=80",
]
SEARCH = [
    "sweep=optuna",
    "run.name=search",
    "optimizer.lr=tag(log,interval(1e-4,1e-1))",
    "optimizer.weight_decay=0.0,0.1",
]


def sweep(
    *overrides: str, cwd: Path, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [*TRAIN, "-m", *SMALL, *overrides]
    result = running.run(command, cwd=cwd, env=running.environment(**environment), fork=False)
    assert not check or result.returncode == 0, result.stderr[-6000:]
    return result


def start(*overrides: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAIN, "-m", *SMALL, *overrides],
        cwd=cwd,
        env=running.environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


# ---------------------------------------------------------------- the search space
@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("optimizer.lr=interval(0.1,0.5)", "Float", {"low": 0.1, "high": 0.5, "log": False}),
        ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "Float", {"low": 1e-4, "log": True}),
        ("model.layers=int(interval(1,5))", "Int", {"low": 1, "high": 5, "step": 1}),
        ("model.layers=range(2,9,3)", "Int", {"low": 2, "high": 8, "step": 3}),
        ("data.noise=range(0.1,0.35,0.1)", "Float", {"low": 0.1, "high": pytest.approx(0.3)}),
        ("optimizer=adamw,sgd", "Categorical", {"choices": ("adamw", "sgd")}),
        ("run.notes=choice('a b',c)", "Categorical", {"choices": ("a\\ b", "c")}),
    ],
)
def test_values_are_read_in_hydras_words(text, kind, expected):
    pytest.importorskip("optuna")
    (parameter,), fixed = space.read({}, [text, "seed=3"])
    assert fixed == ["seed=3"]
    found = parameter.distribution
    assert type(found).__name__ == f"{kind}Distribution"
    assert {name: getattr(found, name) for name in expected} == expected


def test_typed_values_replace_those_of_the_file():
    params = {
        "optimizer.lr": "interval(0.1,0.5)",
        "model.layers": "1,2",
        "data.noise": None,
        "seed": True,
    }
    parameters, fixed = space.read(params, ["optimizer.lr=0.3", "sweep=optuna"])
    assert [each.key for each in parameters] == ["model.layers"]
    assert fixed == ["optimizer.lr=0.3", "sweep=optuna", "data.noise=null", "seed=true"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=interval(0.5,0.1)", r"interval\(0.5,0.1\): .*low <= high"),
        ("model.layers=range(3,3)", "holds no value"),
        ("seed=1", "nothing to choose"),
    ],
)
def test_a_space_without_values_is_refused(text, expected):
    with pytest.raises(ConfigError, match=expected):
        space.read({}, [text])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["optimizer.lr=-1"], "refused: optimizer.lr=-1"),  # a sweep of one trial
        (
            ["sweep=lr", "hydra.sweeper.max_batch_size=-1"],
            "hydra.sweeper.max_batch_size=-1: type a number of trials",
        ),
        (
            ["optimizer.lr=interval(1e-4,1e-2)"],
            "Type sweep=optuna, which chooses them, or a list, as in optimizer.lr=A,B",
        ),
        (
            ["optimizer.lr=glob(*)"],
            "optimizer.lr=glob(*): it names no value, and there would be no trial.",
        ),
    ],
)
def test_a_sweep_is_refused_before_its_first_trial(typed, expected):

    def check(cfg, overrides):
        if cfg.optimizer.lr < 0:
            raise ConfigError(f"refused: {overrides[-1]}")

    (problem,) = explain_sweep(["experiment=example", *typed], check)
    assert expected in problem


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["sweep=lr"],
            "sweep=lr: here it has no effect. Leave it out; python train.py -m sweep=lr starts the "
            "sweep.",
        ),
        (["-m", "sweep=lr,optuna"], "sweep=lr,optuna: it takes one value. Type sweep=NAME"),
        (["-m", "sweep.parallel=1,2"], "sweep.parallel=1,2: it takes one value."),
        (["sweep.parallel=2"], "sweep.parallel=2: here it has no effect. Leave it out"),
        (
            ["seed=1", "-m", "optimizer.lr=1,2"],
            "optimizer.lr=1,2: not read, since an option stands before",
        ),
        (
            ["--trainer.max_steps=3"],
            "--trainer.max_steps=3: keys have no hyphens. Type trainer.max_steps=3.",
        ),
        (
            ["--experiment=digits"],
            "--experiment=digits: keys have no hyphens. Type experiment=digits.",
        ),
        (["--fast"], "--fast: there is no such option. A key is typed as fast=VALUE; --help shows"),
    ],
)
def test_a_sweep_that_would_have_no_effect_is_refused(words, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setattr(cli.gc, "disable", lambda: None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # restored at the end
    with pytest.raises(cli.Refused):
        cli.run(lambda: pytest.fail("it was started"))
    assert expected in capsys.readouterr().err


def test_a_sampler_that_refuses_its_arguments_is_named_with_them():
    pytest.importorskip("optuna")
    with pytest.raises(
        ConfigError,
        match=r"hydra.sweeper.sampler: TPESampler does not take seed=-1: ValueError: Seed",
    ):
        study.plugin_of("sampler", {"name": "TPESampler", "seed": -1})


def test_both_ends_are_checked_before_the_first_trial():
    typed = [
        "sweep=optuna",
        "experiment=example",
        "model.width=int(interval(-3,8))",
        "optimizer.lr=interval(0.1,1)",
    ]

    def check(cfg, overrides):
        if cfg.model.width < 1 + 2 * cfg.seed:
            raise ConfigError(f"model.width={cfg.model.width}: too small")

    assert explain_sweep(typed, check) == ["model.width=-3: too small"]
    # what fits some of the others' values is left to its trials
    assert not explain_sweep(["seed=0,1", "model.width=2,3"], check)


# ---------------------------------------------------------------- table and report
def make(folder: Path, number: int, metric: float | None, **values: object) -> None:
    trial = folder / str(number)
    trial.mkdir(parents=True)
    policy = {"monitor": "val/accuracy", "mode": "max"}
    kept = {"checkpoint": policy, "seed": values.get("seed", 9)}
    (trial / "config.yaml").write_text(yaml.safe_dump(kept))
    (trial / "overrides.txt").write_text(
        "seed=9\n\n" + "".join(f"{key}={value}\n" for key, value in values.items())
    )
    if metric is not None:
        found = (
            f'{{"stop_reason": "finished", "global_step": 8, "best_score": {metric}, '
            f'"metrics": {{"val/accuracy": {metric}}}}}'
        )
        (trial / "summary.json").write_text(found)


@pytest.fixture
def grid(tmp_path):
    folder = tmp_path / "<b>grid"
    for number, (lr, seed, metric) in enumerate(
        [("1e-3", 0, 0.8), ("1e-3", 1, 0.81), ("1e-2", 0, 0.9), ("1e-2", 1, 0.92)]
    ):
        make(
            folder,
            number,
            metric,
            **{"optimizer.lr": lr, "seed": seed, "run.name": "grid", "run.notes": "<i>"},
        )
    make(folder, 10, None, **{"optimizer.lr": "1e-2", "seed": 2})
    return folder


def test_trials_are_ranked_by_their_metric_and_those_without_one_come_last(grid):
    found = trials.read(grid)
    assert found is not None
    assert [trial.number for trial in found.trials] == [3, 2, 1, 0, 10]
    assert found.keys == ("optimizer.lr", "seed")
    rows = trials.table(found)
    assert rows[0] == ["rank", "trial", "val/accuracy", "optimizer.lr", "seed", "step", "state"]
    assert rows[1] == ["1", "3", "0.92", "1e-2", "1", "8", "finished"]
    assert rows[-1] == ["–", "10", "–", "1e-2", "2", "–", "failed"]


def test_the_report_escapes_what_it_shows_and_loads_nothing(grid):
    sweep = trials.read(grid)
    page = report.html(sweep, {"<b>": 0.5})
    assert "<b>" not in page
    assert "&lt;b&gt;grid" in page
    assert not re.search(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)|url\(", page)
    assert page.count("<circle") == 2 * 4


def test_the_end_of_a_sweep_prints_the_table(grid, capsys):
    with conclude.concluding():
        conclude.asked[grid] = 6
    printed = capsys.readouterr().err
    assert "4 of 6 trials finished; val/accuracy, highest first" in printed
    assert re.search(r"^1e-2 +2 +0.91 ± 0.014$", printed, re.MULTILINE)
    assert f"best: {grid / '3'}" in printed
    assert [row["trial"] for row in ranks(grid)] == ["3", "2", "1", "0", "10"]
    for file in grid.glob("*/summary.json"):
        file.write_text('{"metrics": {"f1": 0.9}}')
    conclude.conclude(grid)
    assert (
        "no trial has logged it. Type another run.name, and checkpoint.monitor= with one of f1"
        in capsys.readouterr().err
    )


# ---------------------------------------------------------------- trials that are refused
@pytest.fixture
def trial(monkeypatch):
    """Return the function that runs trial 1 of a sweep, whose values are refused."""

    def run(folder: Path, *overrides: str) -> None:
        typed = [
            "experiment=example",
            f"run.root={folder}",
            "run.name=grid",
            "hydra.mode=MULTIRUN",
            *overrides,
        ]
        with composing():
            hydra = {
                "hydra.runtime.output_dir": str(folder),
                "hydra.job.num": 1,
                "hydra.job.id": "1",
            }
            cfg = compose("train", typed, return_hydra_config=True)
        for key, value in hydra.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
        HydraConfig.instance().set_config(cfg)

        def refused(cfg):
            raise ConfigError("these values do not fit")

        cli.report_errors(refused)(cfg)

    return run


def test_a_refused_trial_does_not_stop_the_others(trial, tmp_path, capsys):
    with pytest.raises(
        RunFailed, match="trial 1 was refused: 1 problem:\n  - these values do not fit"
    ) as refused:
        trial(tmp_path, "seed=3")
    assert refused.value.exit_code == cli.EXIT_CONFIG
    assert "these values do not fit" in capsys.readouterr().err


def study_of(folder):
    from armature.sweeps import study

    return study.open_study(folder)


@pytest.mark.slow
def test_a_killed_search_continues_and_several_processes_share_it(tmp_path):
    pytest.importorskip("optuna")
    folder = tmp_path / "outputs" / "search"
    words = [
        *SEARCH,
        "hydra.sweeper.trials=4",
        "hydra.sweeper.pruner=null",
        "+callbacks.stop_at.signals={SIGKILL:4}",
        "+callbacks.stop_at._target_=armature.callbacks.stop_at.StopAt",
    ]
    assert sweep(*words, cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    assert [trial.state.name for trial in study_of(folder).trials] == ["RUNNING"]
    values = study_of(folder).trials[0].params
    workers = [start(*words, cwd=tmp_path) for _ in range(2)]
    assert not any("Traceback" in worker.communicate(timeout=240)[1] for worker in workers)
    for _ in range(6):  # each trial is killed once, and its process with it
        if [trial.state.name for trial in study_of(folder).trials] == ["COMPLETE"] * 4:
            break
        sweep(*words, cwd=tmp_path, check=False)
    study = study_of(folder)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
    assert study.trials[0].params == values
    for trial in study.trials:
        assert trial.value == running.summary(folder / str(trial.number))["best_score"]
        assert (folder / str(trial.number) / "overrides.txt").read_text().count(
            "optimizer.lr="
        ) == 2  # two starts
    again = sweep(*words, cwd=tmp_path)
    assert "4 of 4 trials finished" in again.stderr
    assert len(study_of(folder).trials) == 4
    other = sweep(
        *words, "optimizer.lr=interval(0.1,0.2)", "data.noise=0.3", cwd=tmp_path, check=False
    )
    assert other.returncode == 2
    assert "was begun with other" in other.stderr


@pytest.mark.slow
def test_hopeless_trials_are_pruned_and_trials_may_have_several_ranks(tmp_path):
    optuna = pytest.importorskip("optuna")
    words = [
        "sweep=optuna",
        "run.name=search",
        "optimizer.lr=choice(1e-9)",
        "optimizer.weight_decay=0.0",
        "strategy=ddp",
    ]
    words += [
        "hydra.sweeper.pruner.name=ThresholdPruner",
        "+hydra.sweeper.pruner.lower=0.99",
        "hydra.sweeper.trials=1",
    ]
    words += ["+hydra.sweeper.pruner.n_warmup_steps=3"]
    result = sweep(
        *words, "~hydra.sweeper.pruner.n_startup_trials", "trainer.devices=2", cwd=tmp_path
    )
    (trial,) = study_of(tmp_path / "outputs" / "search").trials
    assert trial.state == optuna.trial.TrialState.PRUNED, result.stderr[-3000:]
    summary = running.summary(tmp_path / "outputs" / "search" / "0")
    assert (summary["global_step"], summary["world_size"]) == (4, 2)
    assert sorted(trial.intermediate_values) == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hydra.sweeper.sampler.name=TPSampler"], "Did you mean 'TPESampler'?"),
        (["+hydra.sweeper.pruner.patience=3"], "MedianPruner does not take n_startup_trials=5"),
        (["hydra.sweeper.trials=0"], "hydra.sweeper.trials=0: type 1 or more."),
        (["hydra/launcher=joblib"], "type sweep.parallel=auto for several trials at once"),
    ],
)
def test_settings_of_a_search_that_cannot_be_used_are_refused(words, expected, tmp_path):
    pytest.importorskip("optuna")
    if "hydra/launcher=joblib" in words:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    result = sweep(*SEARCH, *words, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert expected in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_grid_under_launchers_of_hydra(launcher, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    result = sweep("seed=0,1", "run.name=grid", f"hydra/launcher={launcher}", cwd=tmp_path)
    assert "2 of 2 trials finished" in result.stderr
