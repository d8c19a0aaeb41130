"""When a Slurm job ends, and how long before that a run stops."""

import pytest

from armature.launcher import slurm

BEGIN, HOUR = 1_772_618_400.0, 3600.0


@pytest.fixture
def job(monkeypatch):
    """A job that began a minute ago, and has a limit."""
    monkeypatch.setattr(slurm.time, "time", lambda: BEGIN + 60)
    monkeypatch.delenv("RANK", raising=False)

    def limit(seconds: float | None) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(BEGIN)))
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(BEGIN + seconds)) if seconds else "")

    return limit


@pytest.mark.parametrize(("limit", "stop"), [(HOUR, HOUR - 300), (480, 360), (None, None)])
def test_a_run_stops_ahead_of_the_limit_and_a_short_job_keeps_three_quarters(limit, stop, job):
    job(limit)
    assert slurm.stop_at(5) == (None if stop is None else BEGIN + stop)
    assert slurm.stop_at(None) is None


def test_a_limit_that_has_passed_is_no_deadline(job, caplog):
    job(30)
    assert slurm.stop_at(5) is None
    assert "should have ended already" in caplog.text
