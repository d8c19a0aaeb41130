"""When a Slurm job ends, and how long before that a run stops."""

import time

import pytest

from armature.launcher import slurm

BEGIN = time.mktime((2026, 3, 4, 10, 0, 0, 0, 0, -1))
HOUR = 3600.0
JOB = (
    "JobId=7 JobName=x\n   JobState=RUNNING Requeue=1\n   RunTime=00:01:00 TimeLimit={limit} "
    "TimeMin=N/A\n"
)
JOB += "   StartTime=2026-03-04T10:00:00 EndTime={end} Deadline=N/A\n"


@pytest.fixture(autouse=True)
def _job(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(slurm.time, "time", lambda: BEGIN + 60)


@pytest.fixture
def scontrol(monkeypatch, tmp_path):
    """A program of that name, which answers for job 7 only and notes that it was asked."""

    def answer(limit: str, end: str) -> None:
        (tmp_path / "answer").write_text(JOB.format(limit=limit, end=end))
        program = tmp_path / "scontrol"
        program.write_text(
            f'#!/bin/sh\necho asked >>{tmp_path}/asked\n[ "$SLURM_TIME_FORMAT" = standard ] || '
            "exit 1\n"
            f'[ "$*" = "show job 7" ] && cat {tmp_path}/answer\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")  # of a user who likes it so

    return answer


def test_slurm_tells_the_end_in_a_variable(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(BEGIN)))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(BEGIN + HOUR)))
    assert slurm.times()[1] == BEGIN + HOUR
    assert slurm.stop_at(5) == BEGIN + HOUR - 300


def test_else_its_controller_is_asked(scontrol):
    scontrol("01:00:00", "2026-03-04T11:00:00")
    assert slurm.times()[1] == BEGIN + HOUR
    assert slurm.stop_at(5) == BEGIN + HOUR - 300
    assert slurm.stop_at(None) is None


def test_a_short_job_keeps_three_quarters_of_its_time(scontrol):
    scontrol("00:08:00", "2026-03-04T10:08:00")
    assert slurm.stop_at(5) == BEGIN + 6 * 60


@pytest.mark.parametrize(
    ("limit", "end"), [("UNLIMITED", "2027-03-04T10:00:00"), ("01:00:00", "Unknown")]
)
def test_without_a_limit_there_is_no_deadline(limit, end, scontrol):
    scontrol(limit, end)
    assert slurm.times()[1] is None
    assert slurm.stop_at(5) is None


def test_one_rank_asks_for_all(scontrol, monkeypatch, tmp_path):
    scontrol("01:00:00", "2026-03-04T11:00:00")
    monkeypatch.setenv("RANK", "3")
    assert slurm.times()[1] is None
    assert not (tmp_path / "asked").exists()


def test_outside_of_a_job_nobody_is_asked(scontrol, monkeypatch, tmp_path):
    scontrol("01:00:00", "2026-03-04T11:00:00")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm.times()[1] is None
    assert not (tmp_path / "asked").exists()


def test_a_controller_that_does_not_answer_sets_no_deadline(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert slurm.times()[1] is None
