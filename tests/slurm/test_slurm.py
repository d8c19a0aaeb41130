"""Real jobs on a real Slurm: submitted, signaled, preempted, out of time, canceled, and going on by
themselves.
"""

import contextlib
import sys
from pathlib import Path

import pytest

from tests import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
STEPS = 120
SLOW = '''
import os
import time

from lightning.pytorch import Callback


class Slow(Callback):
    """Holds the first start up, so that there is time to stop it."""

    def on_train_batch_end(self, *args):
        if "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(float(os.environ["SLOW_SECONDS"]))


class Fail(Callback):
    """A mistake in the user's code, on one rank of several."""

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            raise ArithmeticError("the deliberate mistake")
'''


class Submitter:
    def __init__(self, slurm, corpus: Path, folder: Path) -> None:
        self.slurm, self.corpus, self.folder = slurm, corpus, folder
        (folder / "slow").mkdir()
        (folder / "slow" / "__init__.py").write_text(SLOW)

    def __call__(self, options: list[str], *overrides: str, slow_seconds: float = 0.25) -> str:
        """The id of a job of train.sbatch, tiny and slow at its first start."""
        allowed = "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,slow]"
        arguments = running.command(
            f"trainer.max_steps={STEPS}",
            "trainer.val_every_n_steps=100",
            "scheduler=constant",
            "+callbacks.slow._target_=slow.Slow",
            allowed,
            f"run.root={self.folder / 'outputs'}",
            *overrides,
            corpus=self.corpus,
            launcher=[
                "sbatch",
                "--parsable",
                f"--output={self.folder}/%j.log",
                *options,
                "scripts/slurm/train.sbatch",
            ],
        )
        return self.slurm.run(
            *arguments,
            ARMATURE_CACHE=str(self.folder / "cache"),
            PYTHON=sys.executable,
            PYTHONPATH=str(self.folder),
            SLOW_SECONDS=str(slow_seconds),
        ).strip()

    def run_dir(self, job: str) -> Path:
        return self.folder / "outputs" / job

    def log(self, job: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{job}.log").read_text()
        return ""

    def wait_for_rows(self, job: str) -> None:
        def there() -> bool:
            assert self.slurm.state(job) in ("PENDING", "RUNNING"), self.log(job)
            return (self.run_dir(job) / "metrics.csv").exists()

        running.wait_for(there, seconds=120, what=f"the first rows of job {job}")

    def assert_went_on_to_the_end(self, job: str, *, world_size: int) -> None:
        """Stopped once with a checkpoint, brought back, finished; every step once, in one
        directory.
        """
        ended = self.slurm.wait_for_state(
            job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", seconds=150
        )
        log = self.log(job)
        assert ended["JobState"] == "COMPLETED", log
        assert int(ended["Restarts"]) >= 1, log
        assert "resuming from" in log
        summary = running.summary(self.run_dir(job))
        assert (summary["stop_reason"], summary["global_step"], summary["world_size"]) == (
            "finished",
            STEPS,
            world_size,
        )
        assert [int(row["step"]) for row in running.rows(self.run_dir(job))] == list(
            range(1, STEPS + 1)
        )


@pytest.fixture(scope="module")
def submit(slurm, corpus, tmp_path_factory):
    return Submitter(slurm, corpus, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def limited(submit):
    """Submitted first, since a time limit is a minute at least: the other tests run meanwhile.

    Slurm signals up to 30 s early: here 35 to 65 s after the job's start, which on busy cores takes
    more than 20.
    """
    return submit(["--time=2", "--signal=USR1@55"], slow_seconds=0.6)


@pytest.fixture(scope="module")
def unwarned(submit):
    """The same without a signal that means anything; of a minute, a quarter is left to save in."""
    return submit(["--time=1", "--signal=CONT@1"], slow_seconds=0.6)


@pytest.fixture(scope="module")
def ranks(submit, limited, unwarned):
    """Two nodes, a rank on each, started by srun; stopped by SIGUSR1."""
    job = submit(["--nodes=2"], "strategy=ddp")
    submit.wait_for_rows(job)
    submit.slurm.run("scancel", "--signal=USR1", job)
    return job


@pytest.mark.guarantee
def test_srun_ranks_on_two_nodes_go_on_after_sigusr1(submit, ranks):
    submit.assert_went_on_to_the_end(ranks, world_size=2)
    assert "SIGUSR1 at step" in submit.log(ranks)
    assert "2 cpu ranks (gloo) on 2 machines" in submit.log(ranks)


def test_an_agent_on_each_node_goes_on_after_sigusr1(submit, ranks):
    job = submit(["--nodes=2", "--ntasks-per-node=1"], "strategy=ddp", "trainer.devices=2")
    submit.wait_for_rows(job)
    submit.slurm.run("scancel", "--signal=USR1", job)
    submit.assert_went_on_to_the_end(job, world_size=4)
    assert "Stopped by SIGUSR1" in submit.log(job)
    submit.slurm.wait_for_state(ranks, "COMPLETED", seconds=150)
    assert running.losses(submit.run_dir(job)) == pytest.approx(
        running.losses(submit.run_dir(ranks)), rel=1e-4
    )


def test_a_canceled_job_saves_and_stays_canceled(submit):
    job = submit([])
    submit.wait_for_rows(job)
    submit.slurm.run("scancel", job)
    ended = submit.slurm.wait_for_state(
        job, "CANCELLED", "PENDING", "COMPLETED", "FAILED", seconds=60
    )
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), submit.log(job)
    summary = running.summary(submit.run_dir(job))
    assert summary["stop_reason"] == "SIGTERM"
    last = (submit.run_dir(job) / "checkpoints" / "last").read_text()
    assert last == f"step={summary['global_step']:06d}\n"


def test_a_rank_that_fails_ends_the_job(submit):
    job = submit(["--ntasks=2"], "strategy=ddp", "+callbacks.fail._target_=slow.Fail")
    ended = submit.slurm.wait_for_state(job, "FAILED", "COMPLETED", seconds=90)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0"), (
        submit.log(job)
    )
    assert "the deliberate mistake" in submit.log(job)


def test_a_mistake_is_not_requeued(submit):
    job = submit([], "trainer.num_nodes=2")
    wrong = submit(["--ntasks=2"], "trainer.devices=4")
    for name in (job, wrong):
        ended = submit.slurm.wait_for_state(name, "FAILED", "COMPLETED", seconds=60)
        assert (ended["ExitCode"], ended["Restarts"]) == ("2:0", "0")
    assert "Type trainer.devices=2 trainer.num_nodes=1" in submit.log(wrong)


def test_the_time_limit_requeues_with_a_checkpoint(submit, limited):
    submit.assert_went_on_to_the_end(limited, world_size=1)
    assert "SIGUSR1 at step" in submit.log(limited)


def test_a_job_stops_by_itself_before_the_time_limit(submit, unwarned):
    submit.assert_went_on_to_the_end(unwarned, world_size=1)
    assert "time_limit at step" in submit.log(unwarned)
    assert "Stopped before the job's time limit after step" in submit.log(unwarned)


def test_a_preempted_job_goes_on_after_the_urgent_one(submit):
    job = submit([])
    submit.wait_for_rows(job)
    urgent = submit.slurm.run(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=true",
    ).strip()
    submit.slurm.wait_for_state(urgent, "COMPLETED", seconds=60)
    submit.assert_went_on_to_the_end(job, world_size=1)
    assert "SIGTERM at step" in submit.log(job)


def test_an_array_trains_a_seed_in_each_task(submit):
    array = submit(["--array=3,5"], "trainer.max_steps=2", slow_seconds=0)
    for seed in (3, 5):
        submit.slurm.wait_for_state(f"{array}_{seed}", "COMPLETED", seconds=90)
        config = (submit.run_dir(f"{array}_{seed}") / "config.yaml").read_text()
        assert f"\nseed: {seed}\n" in config
    assert running.losses(submit.run_dir(f"{array}_3")) != running.losses(
        submit.run_dir(f"{array}_5")
    )
