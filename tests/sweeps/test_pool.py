"""Trials side by side: their devices, kills of trials and of the sweep, and what ends in a list."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hydra import compose
from omegaconf import OmegaConf

from armature import hardware
from armature.sweeps import pool
from armature.validation import checks
from armature.validation.composing import composing
from tests import running
from tests.sweeps.test_sweeps import start, sweep

TRIAL = """
import json, os, pathlib, sys
sys.stdin.buffer.read()
names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_PROCID")
found = {name: os.environ.get(name) for name in names}
pathlib.Path(sys.argv[2], "seen").write_text(json.dumps(found))
sys.exit({0: 0, 1: 3, 2: 143}[int(pathlib.Path(sys.argv[2]).name) % 3])
"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Return the function that runs trials whose processes only note their environment."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRIAL)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setattr(hardware, "gpu_count", lambda: 8)
    monkeypatch.setattr(hardware, "cpu_count", lambda: 16)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(count: int, *typed: str) -> tuple[list[pool.Result], list[dict]]:
        with composing():
            cfg = compose("train", ["run.name=grid", *typed], return_hydra_config=True)
        loader = SimpleNamespace(load_sweep_config=lambda cfg, overrides: cfg.copy())
        launcher = SimpleNamespace(config=cfg, hydra_context=SimpleNamespace(config_loader=loader))
        folder = Path("outputs/grid")

        def claimed():
            for number in range(count):
                claim = pool.claim(folder, number)
                assert claim is not None
                assert pool.claim(folder, number) is None
                yield pool.Trial(number, [f"seed={number}"], claim)

        found = [*pool.results(launcher, claimed(), asked=count)]
        return found, [json.loads((folder / str(i) / "seen").read_text()) for i in range(count)]

    return run


def at_once(printed: str) -> list[set[str]]:
    """Return which trials run after each line. No two of them have a GPU in common."""
    running: dict[str, set[str]] = {}
    found = []
    for number, text in re.findall(r"^trial (\d+) \(.*?\): (.*)$", printed, re.MULTILINE):
        if text.startswith("started"):
            devices = {*text.removeprefix("started on GPU ").split(",")} - {"started"}
            assert not any(devices & others for others in running.values())
            running[number] = devices
        else:
            del running[number]
        found.append({*running})
    return found


def test_each_trial_has_gpus_of_its_own(results, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d,e,f,g,h")
    typed = ("trainer.accelerator=gpu", "trainer.devices=2", "sweep.parallel=auto")
    found, seen = results(6, *typed)
    assert max(map(len, at_once(capsys.readouterr().err))) == 4
    devices = [each["CUDA_VISIBLE_DEVICES"] for each in seen]
    assert devices[:4] == ["a,b", "c,d", "e,f", "g,h"]
    assert {each["SLURM_PROCID"] for each in seen} == {None}
    ends = {each.trial.number: str(each.error or "finished") for each in found}
    assert ends[0] == "finished"
    assert "logs/output.log" in ends[1]
    assert "stopped by SIGTERM; the same command resumes it" in ends[2]


def test_trials_on_a_cpu_share_its_cores(results, capsys):
    _, seen = results(3, "trainer.accelerator=cpu", "sweep.parallel=3")
    assert max(map(len, at_once(capsys.readouterr().err))) == 3
    assert {each["OMP_NUM_THREADS"] for each in seen} == {"5"}


def test_a_trial_whose_task_does_not_take_the_default_model_is_finished_too(tmp_path):
    words = ["data=digits", "task._target_=lightning.pytorch.demos.boring_classes.BoringModel"]
    with composing():
        cfg = compose("train", words)
    checks.forget_unused_groups(ended := cfg.copy())
    OmegaConf.save(ended, tmp_path / "config.yaml")
    (tmp_path / "summary.json").write_text('{"stop_reason": "finished"}')
    assert pool._is_finished(tmp_path, cfg)


@pytest.mark.slow
def test_killed_trials_and_a_killed_sweep_are_resumed_and_finished_ones_are_skipped(tmp_path):
    folder = tmp_path / "outputs" / "grid"
    words = [
        "seed=0,1", "run.name=grid", "sweep.parallel=2",
        "+callbacks.stop_at.signals={SIGKILL:4}",
        "+callbacks.stop_at._target_=armature.callbacks.stop_at.StopAt",
    ]  # fmt: skip
    with start(*words, cwd=tmp_path) as whole:
        while not (folder / "0" / "config.yaml").is_file():
            assert whole.poll() is None
            time.sleep(0.05)
        children = psutil.Process(whole.pid).children()
        whole.send_signal(signal.SIGKILL)
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)
    # on a busy machine one may have come to its own kill, and the other may have begun
    begun = (starts := folder / "1/overrides.txt").exists()
    left = [n for n in (0, 1) if not (folder / f"{n}/.stopped-at-4").exists()]
    killed = sweep(*words, cwd=tmp_path, check=False)  # each kills itself once
    assert killed.returncode == 1
    for number in left:
        assert f"trial {number}: killed by SIGKILL; the same command resumes it" in killed.stderr
    ended = sweep(*words, cwd=tmp_path)
    assert "2 of 2 trials finished" in ended.stderr
    assert "mean ± standard deviation over seeds and folds:" in ended.stderr
    assert starts.read_text().count("\n\n") == 1 + (begun and 1 in left)  # two starts more
    again = sweep(*words, cwd=tmp_path)
    assert again.stderr.count("of 2, 0 s]") == 2
    assert "started" not in again.stderr


@pytest.mark.slow
def test_ctrl_c_saves_all_trials(tmp_path):
    words = ["run.name=grid", "sweep.parallel=2", "trainer.max_steps=100000", "seed=0,1"]
    with start(*words, cwd=tmp_path) as whole:
        folder = tmp_path / "outputs" / "grid"
        while not all((folder / str(i) / "metrics.csv").is_file() for i in range(2)):
            assert whole.poll() is None
            time.sleep(0.05)
        os.kill(whole.pid, signal.SIGINT)
        _, text = whole.communicate(timeout=120)
    assert whole.returncode == 130
    assert "The same command with run.name=grid resumes it." in text
    assert [running.summary(folder / str(i))["stop_reason"] for i in range(2)] == ["SIGINT"] * 2
