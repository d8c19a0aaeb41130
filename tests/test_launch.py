"""The launcher in all its ways: in process, elastic agent, torchrun, sweeps,
signals, errors.
"""

import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.types import RunMode

from armature import cli, launch, run_dir
from armature.checkpoint import resume
from armature.errors import ConfigError
from armature.validation.compose import explain_sweep
from tests import running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache")]
TRAIN = str(running.ROOT / "train.py")
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    TRAIN,
]


@pytest.fixture(scope="module")
def single(tmp_path_factory, corpus):
    """The run that every other one is compared with."""
    folder = tmp_path_factory.mktemp("single")
    running.train("run.name=run", "logger=tensorboard", cwd=folder, corpus=corpus, fork=False)
    return folder / "outputs" / "run"


def assert_same_losses(run_dir, single):
    assert running.losses(run_dir) == pytest.approx(running.losses(single), rel=1e-5)


@pytest.mark.guarantee
def test_one_process_fills_the_run_directory(single):
    names = {path.name for path in single.iterdir()}
    assert names >= {
        "config.yaml",
        "overrides.txt",
        "checkpoints",
        "metrics.csv",
        "summary.json",
        "logs",
        "tensorboard",
    }
    assert [row["step"] for row in running.rows(single)] == [*"123456"]
    assert [bool(row["val/loss"]) for row in running.rows(single)] == [False, False, True] * 2
    assert (single / "checkpoints" / "last").read_text() == "step=000006\n"
    summary = running.summary(single)
    assert summary == summary | {"stop_reason": "finished", "global_step": 6, "world_size": 1}
    assert summary["metrics"].keys() >= {
        "train/loss",
        "val/loss",
        "test/loss",
        "test/bits_per_byte",
    }
    assert list((single / "tensorboard").glob("events*"))
    assert (single / "logs/rank_0000.log").exists()


@pytest.mark.guarantee
def test_torchrun_joins_as_ranks(single, train, tmp_path):
    train("strategy=ddp", "trainer.devices=2", launcher=TORCHRUN)
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert_same_losses(run_dir, single)


def test_torchrun_with_another_number_of_processes_is_refused(train):
    said = train("trainer.devices=1", launcher=TORCHRUN, code=None).stderr
    assert "but the launcher started 2. Type trainer.devices=2 trainer.num_nodes=1." in said


def test_a_sweep_runs_each_trial_once_in_its_own_directory(train, tmp_path):
    launcher = [sys.executable, TRAIN, "-m"]
    overrides = [
        "seed=0,1",
        "strategy=ddp",
        "trainer.devices=2",
        "trainer.max_steps=3",
        "run.name=group/sweep",
    ]
    train(*overrides, launcher=launcher)
    sweep = tmp_path / "outputs" / "group" / "sweep"
    trials = sorted(path for path in sweep.glob("[!.]*") if path.is_dir())
    assert [trial.name for trial in trials] == ["0", "1"]
    assert [running.summary(trial)["global_step"] for trial in trials] == [3, 3]
    assert running.losses(trials[0]) != running.losses(trials[1])
    again = train(*overrides, launcher=launcher)
    assert again.stderr.count("is finished (3 steps)") == 2
    overrides[0] = "seed=2,3"
    other = train(*overrides, launcher=launcher, code=2)
    assert "trained with other settings" in other.stderr
    assert "seed=0 there, 2 here" in other.stderr


def test_a_trial_that_was_begun_with_other_values_is_refused(monkeypatch, tmp_path):
    hydra = SimpleNamespace(
        initialized=lambda: True, get=lambda: SimpleNamespace(mode=RunMode.MULTIRUN)
    )
    monkeypatch.setattr(launch, "HydraConfig", hydra)
    monkeypatch.setattr(launch.supervise, "run", print)
    trial = run_dir.decide(
        cli.compose(["seed=1", "trainer.accelerator=cpu"]), label="x", trial=f"{tmp_path}/sweep/0"
    )
    before = trial.copy()
    before.seed, before.checkpoint.monitor = 0, "f1"
    run_dir.write(before, [])
    with pytest.raises(
        ConfigError, match=r"begun with .*: checkpoint.monitor=f1 .*seed=0 there, 1 "
    ):
        launch._run(trial, [], alone=False)
    assert run_dir.read(Path(trial.run.dir)).seed == 0
    before.run.dir = f"{tmp_path}/None"
    run_dir.write(before, [])
    typed = [f"run.root={tmp_path}", "seed=0,1"]
    assert not explain_sweep(typed, dict)  # its name will be the time
    assert explain_sweep([*typed, "run.name=None"], dict) == [
        f"{tmp_path}/None holds a run, not a sweep. Type another run.name."
    ]
    trial.run.dir = f"{tmp_path}/sweep"
    with pytest.raises(ConfigError, match=r"sweep holds a sweep, not a run. Type another run.name"):
        launch._run(trial, [], alone=False)


def test_a_run_of_other_classes_is_answered_with_what_was_typed_for_it(tmp_path):
    typed = ["trainer.accelerator=cpu", f"run.root={tmp_path}", "run.name=a"]
    begun, here = (
        run_dir.decide(cli.compose([*typed, *more]), label="x")
        for more in (["experiment=digits"], [])
    )
    checkpoint = run_dir.write(begun, []) / "checkpoints" / "step=000001"
    problems = resume.mismatches(here, checkpoint)
    assert len(problems) == 2  # model and task
    for problem in problems:
        assert f"Type what {tmp_path}/a/overrides.txt has, or another run.name" in problem


@pytest.mark.guarantee
def test_a_finished_run_says_so_and_stops(single, train):
    again = partial(train, "run.name=run", "logger=tensorboard", cwd=single.parents[1])
    result = again()
    assert "is finished (6 steps)" in result.stderr
    assert len(running.rows(single)) == 6
    earlier = f"resume={single / 'checkpoints' / 'step=000003'}"
    result = again(earlier, code=2)
    assert f"{earlier}: outputs/run has checkpoints of its own" in result.stderr


@pytest.mark.guarantee
def test_resuming_from_a_run_passes_over_its_damaged_checkpoint(single, train, tmp_path):
    run = shutil.copytree(single, tmp_path / "copied")
    newest = run / "checkpoints" / "step=000006"
    shard = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    result = train(f"resume={run}", "trainer.max_steps=6", "run.name=next")
    assert f"{newest} is skipped: {shard.name} was changed" in result.stderr
    rows = running.rows(tmp_path / "outputs" / "next")
    assert [row["step"] for row in rows] == ["3", "4", "5", "6"]
    assert running.losses(tmp_path / "outputs" / "next") == running.losses(single)[2:]


def test_a_resume_that_cannot_work_leaves_the_run_as_it_is(single, train):
    before = (single / "config.yaml").read_text()
    words = ("run.name=run", "trainer.max_steps=9", "model.width=64")
    result = train(*words, cwd=single.parents[1], code=2)
    assert "Type model.width=32, or another run.name" in result.stderr
    assert (single / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("devices", "number", "code"),
    [
        (1, signal.SIGTERM, 143),
        (2, signal.SIGTERM, 143),
        (1, signal.SIGINT, 130),
        (2, signal.SIGINT, 130),
        (1, signal.SIGHUP, 129),
    ],
)
def test_a_signal_ends_every_process_and_the_run_goes_on_later(
    devices, number, code, corpus, train, tmp_path
):
    (tmp_path / "random.py").write_text(
        "raise ImportError('a file beside the data')"
    )  # as in a single process
    ddp = [f"strategy={'ddp' if devices > 1 else 'single'}", "run.name=run"]
    endless = [
        *ddp,
        f"trainer.devices={devices}",
        "trainer.max_steps=100000",
        "trainer.val_every_n_steps=null",
        "scheduler=constant",
    ]
    process, members = running.start(*endless, cwd=tmp_path, corpus=corpus)
    assert len(members) == (1 if devices == 1 else 1 + devices)
    sockets = [each for member in members for each in member.net_connections("inet")]
    # only connections of gloo, within this machine
    assert {each.laddr.ip for each in sockets if each.laddr} == (
        {"127.0.0.1"} if devices > 1 else set()
    )
    started = time.monotonic()
    process.send_signal(number)
    output = process.communicate(timeout=30)[0]
    assert time.monotonic() - started < 10, output
    assert process.returncode == code, output
    running.wait_for(lambda: not running.alive(members), seconds=3, what="no orphan")
    assert "Traceback" not in output
    run_dir = tmp_path / "outputs" / "run"
    summary = running.summary(run_dir)
    steps = summary["global_step"]
    assert summary["stop_reason"] == number.name
    longer = [*ddp, f"trainer.max_steps={steps + 2}", "scheduler=constant"]
    again = train(*longer, ranks=devices)
    assert f"step={steps:06d}, step {steps}" in again.stderr
    assert [int(row["step"]) for row in running.rows(run_dir)] == [*range(1, steps + 3)]


BROKEN = """
from armature.tasks.language_modeling import LanguageModeling


class Broken(LanguageModeling):
    def training_step(self, batch, batch_idx):
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if self.trainer.global_step == 2 and is_last:
            raise ArithmeticError("the deliberate mistake")
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_an_unexpected_error_shows_its_traceback_once(devices, train, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(BROKEN)
    result = train(
        "task._target_=broken.Broken",
        "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,broken]",
        f"strategy={'ddp' if devices > 1 else 'single'}",
        f"trainer.devices={devices}",
        "run.name=run",
        code=1,
        PYTHONPATH=str(tmp_path),
    )
    output = result.stdout + result.stderr
    assert output.count("ArithmeticError: the deliberate mistake") == 1, output
    assert output.count("Traceback (most recent call last)") == 1, output
    if devices > 1:
        assert "Rank 1 failed first" in output


def test_wandb_offline_has_the_losses_and_no_secret_is_on_disk(train, tmp_path):
    marker = "m4rk3r-0f-4-s3cr3t"
    (tmp_path / ".env").write_text(f"WANDB_API_KEY={marker}-dotenv\n")
    train(
        "logger=[tensorboard,wandb]",
        "logger.wandb.offline=true",
        "data.source.field=${oc.env:MY_TOKEN}",
        "trainer.log_every_n_steps=1",
        "run.name=run",
        fork=False,  # wandb writes the rest as the interpreter ends
        MY_TOKEN=marker,
        HOME=str(tmp_path),
    )
    run_dir = tmp_path / "outputs" / "run"
    (file,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in file.read_bytes()
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if marker.encode() in path.read_bytes()] == []


@pytest.mark.guarantee
def test_scripts_work_from_the_run_directory_alone(single, tmp_path):
    arguments = ["--split", "val", "trainer.precision=32-true"]
    evaluate = running.script("evaluate.py", str(single), *arguments, cwd=tmp_path)
    assert "val/bits_per_byte" in evaluate.stdout
    arguments = ["--prompt", "line ", "--tokens", "9", "--seed", "3"]
    texts = [
        running.script("generate.py", str(single), *arguments, cwd=tmp_path).stdout
        for _ in range(2)
    ]
    assert texts[0].startswith("line ")
    assert texts[0] == texts[1]
