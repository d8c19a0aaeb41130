"""Which ends of a job train.sbatch answers with a requeue, with programs of Slurm's that are made
up.
"""

import os
import subprocess

import pytest

from tests import running

SCRIPT = running.ROOT / "scripts" / "slurm" / "train.sbatch"


@pytest.fixture
def end(tmp_path, monkeypatch):
    """Runs the script once with ranks that end as told; returns whether the job was requeued, and
    its messages.
    """
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    answers = {
        "srun": 'echo "$*" >ran; eval "$MEANWHILE"; exit "$CODE"',
        "scontrol": '[ "$1" = show ] && echo "JobId=7 JobState=RUNNING " || echo "$*" >>requeued',
        "python": 'echo "$*" >asked; case " $* " in *" -m "* | *,*) exit 1 ;; esac; '
        'printf "name: $NAME\\nroot: outputs\\n"',
    }
    for name, answer in answers.items():
        (programs / name).write_text(f"#!/bin/sh\n{answer}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").touch()

    def run(code: int, meanwhile: str = "", *typed: str, name: str = "run") -> tuple[bool, str]:
        script = tmp_path / "script"  # Slurm writes it anew for each start
        script.write_text(SCRIPT.read_text())
        os.utime(script, (0, 0))
        for file in tmp_path.glob("outputs/run/**/*"):
            os.utime(file, (-1, -1))
        requeued = tmp_path / "requeued"
        requeued.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "CODE": str(code),
            "NAME": name,
            "MEANWHILE": meanwhile,
        }
        result = subprocess.run(
            ["bash", script, *typed], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert result.returncode == (0 if requeued.exists() else code % 200)
        return requeued.exists(), result.stderr

    return run


def test_the_run_gets_what_the_job_has_unless_it_is_typed(end, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    end(0, "", "trainer.devices=1", "-m")
    ran = (tmp_path / "ran").read_text()
    assert "train.py -m trainer.num_nodes=1 trainer.accelerator=gpu " in ran


def test_options_of_sbatch_after_the_script_are_named(end):
    assert "options of sbatch before the script" in end(2, "", "--nodes=2")[1]


SAVED = "mkdir -p outputs/run/checkpoints; echo step=000004 >outputs/run/checkpoints/last"


def stopped_at(step: int) -> str:
    return f"mkdir -p outputs/run; echo '  \"global_step\": {step},' >outputs/run/summary.json"


@pytest.mark.parametrize("code", [138, 143])
def test_a_stopped_run_that_got_further_is_requeued(code, end):
    assert [end(code, SAVED)[0] for _ in range(5)] == [True] * 5
    # with its checkpoints elsewhere
    assert [end(code, stopped_at(step))[0] for step in (4, 8, 12, 16, 20)] == [True] * 5


def test_a_limit_that_is_too_short_is_told(end):
    requeued, told = end(138)
    assert not requeued
    assert "Raise --time" in told
    assert end(138, stopped_at(4))[0]
    assert not end(138, stopped_at(4))[0]


def test_what_is_stopped_during_its_start_each_time_does_not_come_back_for_ever(end):
    assert [end(143)[0] for _ in range(3)] == [True] * 3
    assert end(143, SAVED)[0]  # the count begins anew
    assert [end(143)[0] for _ in range(3)] == [True] * 3
    requeued, told = end(143)
    assert not requeued
    assert "stopped 4 times in a row before the first checkpoint" in told


def test_the_last_task_of_an_array_is_requeued_alone(end, tmp_path, monkeypatch):
    """Its job id is that of the array, which names all tasks."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    end(138, SAVED)
    assert (tmp_path / "requeued").read_text() == "requeue 7_1\n"


def test_a_failed_run_is_not_requeued(end):
    for code in (137, 201):  # 201: one of the tasks failed with 1
        assert not end(code, SAVED)[0]


SWEEP = ("-m", "experiment=mine", "seed=0,1", "run.name=run")


def of_trial(command: str) -> str:
    return command.replace("outputs/run", "outputs/run/1")


def test_a_sweep_is_requeued_if_any_trial_made_progress(end, tmp_path):
    assert [end(138, of_trial(SAVED), *SWEEP)[0] for _ in range(5)] == [True] * 5
    assert (tmp_path / "outputs" / "run" / "logs" / "requeues").is_file()
    # run.root may be the experiment's
    assert (tmp_path / "asked").read_text().startswith("train.py experiment=mine run.name=run ")
    requeued, told = end(138, "", *SWEEP)
    assert not requeued
    assert "Raise --time" in told


def test_so_is_one_whose_trials_got_further_with_their_checkpoints_elsewhere(end):
    first = stopped_at(4).replace("outputs/run", "outputs/run/0")
    assert end(138, first, *SWEEP)[0]
    assert [end(138, of_trial(stopped_at(step)), *SWEEP)[0] for step in (4, 8, 8)] == [
        True,
        True,
        False,
    ]


def test_a_sweep_without_a_name_is_not_requeued(end, tmp_path):
    requeued, told = end(138, of_trial(SAVED), "--multirun", "seed=0", name="null")
    assert not requeued
    assert "Not requeued: a sweep without run.name starts anew" in told
    assert not (tmp_path / "outputs" / "null").exists()


def test_a_run_whose_directory_is_unknown_is_not_requeued(end):
    requeued, told = end(138, SAVED, "seed=0,1")  # python fails
    assert not requeued
    assert "could not be read" in told
