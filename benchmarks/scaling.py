"""Scaling: measured for a few ranks, and projected to many from the bytes that they would send."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contender import Running
from benchmarks.gate import COUNT_INTO
from benchmarks.job import Workload, ours
from benchmarks.rounds import Record, Rounds

LATENCY = 10e-6  # seconds per hop
PROJECTED = (8, 64, 512, 1024, 4096, 16384)


@dataclass(frozen=True)
class Point:
    """One number of ranks.

    Strong scaling splits the batch; weak scaling gives each rank the batch of one.
    """

    kind: str
    ranks: int
    global_batch_size: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.ranks}"


def points(ranks: Sequence[int], global_batch_size: int) -> Iterator[Point]:
    """Return the points.

    The first number of ranks is the reference of both kinds of scaling, and a single point.

    Raises:
        ValueError: where a number of ranks does not divide the batch.
    """
    for n in ranks:
        if global_batch_size % n:
            raise ValueError(
                f"--scale {n}: data.global_batch_size={global_batch_size} does not divide among "
                f"{n} ranks"
            )
        if n == ranks[0]:
            yield Point("base", n, global_batch_size)
        else:
            yield Point("strong", n, global_batch_size)
            yield Point("weak", n, global_batch_size // ranks[0] * n)


def measure(
    workload: Workload,
    folder: Path,
    *,
    ranks: Sequence[int],
    rounds: int,
    block_seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure steps per second of every point, and the efficiency relative to n times one rank's
    work.
    """
    threads = os.environ.get(
        "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // max(ranks)))
    )
    all_points = list(points(ranks, workload.job.global_batch_size))
    contenders = [
        replace(
            ours(
                workload,
                folder,
                f"data.global_batch_size={p.global_batch_size}",
                name=p.name,
                ranks=p.ranks,
            ),
            environment={"OMP_NUM_THREADS": threads},
        )
        for p in all_points
    ]
    rounds_of = Rounds(
        contenders,
        folder,
        block_seconds=block_seconds,
        multiple=workload.job.log_every_n_steps,
        say=say,
    )
    records = rounds_of.together(rounds)
    return {
        "points": [vars(p) for p in all_points],
        "threads_per_rank": threads,
        "records": records,
    }


def efficiencies(
    point: dict[str, Any], record: Record, base_ranks: int, base: Record
) -> list[float]:
    """Return work per rank and second relative to the base, per round."""
    more = point["ranks"] / base_ranks
    work = 1.0 if point["kind"] == "strong" else more
    return [work * b / (more * a) for a, b in zip(record.seconds, base.seconds, strict=False)]


def count(workload: Workload, folder: Path) -> list[dict[str, Any]]:
    """Return the collectives of one optimizer step of ours on two ranks.

    Raises:
        ContenderFailed: where it does not run.
    """
    file = folder / "collectives.json"
    contender = ours(workload, folder, name="counted", ranks=2)
    running = Running(
        replace(contender, environment={COUNT_INTO: str(file), "OMP_NUM_THREADS": "1"}), folder
    )
    try:
        running.wait_for_first_step()
        running.block(4)
    finally:
        running.stop()
    end = time.monotonic() + 5
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return json.loads(file.read_text())


def sent_per_rank(collectives: Sequence[dict[str, Any]], ranks: int) -> float:
    """Return the bytes that a rank sends in ring algorithms: twice a share for an all-reduce, once
    for the others.

    What one rank sends to another it sends in full, whatever their number.
    """
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "send": 1.0}
    return sum(factors.get(c["kind"], share) * c["bytes"] for c in collectives)


def project(
    collectives: Sequence[dict[str, Any]],
    *,
    compute_seconds: float,
    bandwidth: float,
    latency: float = LATENCY,
) -> list[dict[str, float]]:
    """Project weak-scaling efficiency to many ranks, with all communication hidden behind
    arithmetic and with none.

    A projection, not a measurement: links without contention, ranks without stragglers.

    Args:
        compute_seconds: of one rank's step without communication.
        bandwidth: bytes a second that a rank can send.
        latency: seconds of a hop; a collective of n ranks takes log2(n) of them at least.
    """
    rows = []
    for ranks in PROJECTED:
        waiting = len(collectives) * latency * math.log2(ranks)
        communication = sent_per_rank(collectives, ranks) / bandwidth + waiting
        rows.append(
            {
                "ranks": ranks,
                "gigabytes_sent": sent_per_rank(collectives, ranks) / 1e9,
                "communication_seconds": communication,
                "hidden": compute_seconds / max(compute_seconds, communication),
                "exposed": compute_seconds / (compute_seconds + communication),
            }
        )
    return rows
