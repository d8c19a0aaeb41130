"""scripts/slurm/submit.py: what it would submit, and what it refuses."""

import os
import subprocess
import sys

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from tests import in_process, running

PROJECT = yaml.safe_load((running.ROOT / "configs" / "train.yaml").read_text())["project"][
    "name"
]  # a clone sets it
SUBMIT = running.ROOT / "scripts" / "slurm" / "submit.py"


def submit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SUBMIT), *arguments]
    return running.run(command, cwd=running.ROOT, env=running.environment(**environment))


def options(script: str) -> set[str]:
    return {
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH ")
    }


@pytest.mark.slow
def test_a_dry_run_prints_the_script():
    result = submit(
        "slurm=gpu",
        "slurm.nodes=2",
        "slurm.time=1:30:00",
        "slurm.account=mine",
        "slurm.options=[mem=0,exclusive]",
        "strategy=fsdp",
        "data=text",
        "data.path='a b/*.txt'",
        "--dry-run",
    )
    assert result.returncode == 0, result.stderr
    assert options(result.stdout) == {
        "nodes=2",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "cpus-per-task=8",
        "time=1:30:00",
        "account=mine",
        "mem=0",
        "exclusive",
        "signal=USR1@120",
        f"chdir={running.ROOT}",
        f"job-name={PROJECT}",
        "requeue",
        "open-mode=append",
    }
    syntax = subprocess.run(["bash", "-n"], input=result.stdout, capture_output=True, text=True)
    assert (syntax.returncode, syntax.stderr) == (0, "")
    start = result.stdout.splitlines().index(
        "set -- strategy=fsdp data=text 'data.path='\"'\"'a b/*.txt'\"'\"''"
    )
    assert all(line.startswith("#") or not line for line in result.stdout.splitlines()[:start])


CASES = {
    "other devices than tasks": (
        ["trainer.devices=4"],
        "trainer.devices=4, but slurm.tasks_per_node=8",
    ),
    "other nodes": (
        ["trainer.num_nodes=3"],
        "trainer.num_nodes=3, but slurm.nodes=1. Type slurm.nodes=3 alone.",
    ),
    "more ranks than GPUs": (
        ["slurm.gpus_per_node=4"],
        "8 ranks on each node, but slurm.gpus_per_node=4",
    ),
    "no GPU": (["slurm.gpus_per_node=null", "trainer.accelerator=gpu"], "slurm.gpus_per_node=null"),
    "one seed for all": (["slurm.array=0-3", "seed=1"], "slurm.array=0-3 gives each task its seed"),
    "never resumed": (["resume=never"], "Type resume=auto"),
    "misspelt key of the job": (["slurm.nods=2"], "Did you mean 'slurm.nodes'?"),
    "no number": (["slurm.nodes=two"], "slurm.nodes=two: must be a positive number"),
    "true for a number": (["slurm.nodes=true"], "slurm.nodes=True: must be a positive number"),
    "two words": (
        ["slurm.partition=a b"],
        "slurm.partition='a b': must be one word of sbatch's --partition",
    ),
    "a mapping of options": (["slurm.options={a: 1}"], "slurm.options={'a': 1}: must be a list"),
    "no list of options": (["slurm.options=abc"], "slurm.options=abc: must be a list"),
    "misspelt override": (["stratgy=ddp"], "Did you mean 'strategy'?"),
    "no such cluster": (["slurm=gpus"], "slurm=gpus: there is no such cluster. Options: cpu, gpu"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_told_before_it_waits_in_the_queue(case, monkeypatch, capsys):
    typed, message = CASES[case]
    words = (*([] if typed[0].startswith("slurm=") else ["slurm=gpu"]), *typed, "--dry-run")
    monkeypatch.setattr(sys, "argv", [str(SUBMIT), *words])
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as end:
        in_process.load("slurm/submit").main()
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.slow
def test_what_it_submits_trains(slurm, corpus, tmp_path):
    overrides = [
        *running.TINY,
        f"data.path={corpus}",
        "trainer.max_steps=2",
        f"run.root={tmp_path}",
        "strategy=ddp",
    ]
    job = [
        "slurm=cpu",
        "slurm.nodes=2",
        "slurm.tasks_per_node=1",
        "slurm.cpus_per_task=1",
        "slurm.array=7",
    ]
    job += [f"slurm.options=[output={tmp_path}/%j.log]"]
    environment = {
        **slurm.environment,
        "ARMATURE_CACHE": str(tmp_path / "cache"),
        "PYTHON": sys.executable,
    }
    result = submit(*job, *overrides, **environment)
    assert result.returncode == 0, result.stderr
    number = result.stdout.split()[-1]
    slurm.wait_for_state(f"{number}_7", "COMPLETED", seconds=90)
    assert running.summary(tmp_path / f"{number}_7")["world_size"] == 2
    assert os.listdir(tmp_path / f"{number}_7" / "logs") != []
