"""Cells under a real Slurm of two nodes on this machine: a requeue and the time limit."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.faults import slurm_cluster, tiny_run
from benchmarks.faults.cells import LIMIT, STOCK_SCRIPT, Run, Session, wait_until
from benchmarks.faults.matrix import Cell, Fault, judge

# what a user of plain Lightning would submit: it saves and requeues itself on SIGUSR1
STOCK_BATCH = """\
#!/usr/bin/env bash
#SBATCH --requeue
#SBATCH --open-mode=append
srun "$PYTHON" -u "$@"
"""


class Slurm:
    """A Slurm that is started for the first cell and ended by `close`."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def cluster(self, session: Session) -> slurm_cluster.Cluster:
        def make() -> slurm_cluster.Cluster:
            folder = session.folder / "slurm"
            folder.mkdir()
            return self._stack.enter_context(slurm_cluster.start(folder))

        return session.once("slurm", make)

    def close(self) -> None:
        self._stack.close()


SLURM = Slurm()


def under_slurm(
    options: list[str], strike: Callable[[slurm_cluster.Cluster, str, Run], None]
) -> Callable[[Fault, Run], Cell]:
    """Return the flow of a cell in which a scheduler stops and restarts the run.

    Args:
        options: of sbatch.
        strike: called when every rank waits for a signal.
    """

    def flow(fault: Fault, run: Run) -> Cell:
        if (reason := slurm_cluster.missing()) is not None:
            return Cell(fault.name, run.column.name, f"– {reason}")
        slurm = SLURM.cluster(run.session)
        fault.arm(run)
        job = submit(slurm, run, options)
        wait_until(lambda: run.struck_at() is not None, LIMIT)
        strike(slurm, job, run)
        remarks = []
        limit = 120 + run.column.limit  # time for Slurm itself
        end = time.monotonic() + limit
        while (found := slurm.job(job))["JobState"] not in (
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
        ):
            if time.monotonic() > end:
                slurm.run("scancel", job, check=False)
                run.kill()
                return judge(fault, run, [f"stuck, canceled after {limit:.0f} s"])
            time.sleep(0.3)
        if found["JobState"] != "COMPLETED":
            remarks.append(
                f"{found['JobState']}, exit code {found['ExitCode']}, restarted "
                f"{found['Restarts']} times"
            )
        elif found["Restarts"] == "0":
            remarks.append("not requeued")
        return judge(fault, run, remarks)

    return flow


def submit(slurm: slurm_cluster.Cluster, run: Run, options: list[str]) -> str:
    """Submit a job with one rank per node and return its id."""
    script, arguments = (
        tiny_run.ROOT / "scripts" / "slurm" / "train.sbatch",
        [*run.arguments(), *run.overrides],
    )
    if run.column.stock:
        script = run.folder / "stock.sbatch"
        script.write_text(STOCK_BATCH)
        nodes = [f"--nodes={run.column.ranks}", "--ranks=1"]
        arguments = [str(STOCK_SCRIPT), *run.arguments(), *nodes]
    command = ["sbatch", "--parsable", f"--nodes={run.column.ranks}", "--ntasks-per-node=1"]
    command += [f"--output={run.folder / 'output.0.txt'}", *options, str(script), *arguments]
    own = {name: slurm.environment[name] for name in ("PATH", "SLURM_CONF")}
    return slurm.run(*command, check=True, **run.variables() | own, PYTHON=sys.executable).strip()


def requeue(slurm: slurm_cluster.Cluster, job: str, run: Run) -> None:
    """Requeue the job, as an administrator or a preemption does."""
    run.note_strike()
    slurm.run("scontrol", "requeue", job)


def wait_for_the_limit(slurm: slurm_cluster.Cluster, job: str, run: Run) -> None:
    """Do nothing: the ranks wait."""


FAULTS = (
    Fault(
        "slurm_requeue",
        "requeue by Slurm",
        "at_signaled",
        every_rank=True,
        lost=0,
        flow=under_slurm([], requeue),
        within=120,
        lane="slurm",
    ),
    Fault(
        "slurm_limit",
        "Slurm time limit",
        "at_signaled",
        every_rank=True,
        lost=0,
        overrides=("launch.stop_minutes_before_limit=1",),
        flow=under_slurm(["--time=2", "--signal=USR1@10"], wait_for_the_limit),
        within=120,
        lane="slurm",
    ),
)
