"""Which blocks each pipeline stage holds, and which stages each rank. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# stages a rank holds, whether they run back along the ranks (a V), and how few micro-batches the schedule accepts
SCHEDULES = {
    "gpipe": (1, False),
    "1f1b": (1, False),
    "interleaved_1f1b": (2, False),
    "zero_bubble": (2, True),
}


def balanced(costs: Sequence[int], *, stages: int, first: int = 0, last: int = 0) -> list[int]:
    """How many consecutive blocks each stage takes so that the dearest stage is as cheap as can be.

    Args:
        costs: of each block, in parameters.
        first, last: costs of what only the first and the last stage hold.

    Raises:
        ValueError: with fewer blocks than stages, since each stage holds at least one.
    """
    n = len(costs)
    if n < stages:
        raise ValueError(f"{n} blocks cannot fill {stages} stages")
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def price(stage: int, start: int, end: int) -> int:
        return sums[end] - sums[start] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    # best[s][e]: the dearest of stages 0 … s when they hold the first e blocks, and where stage s starts
    best: list[dict[int, tuple[int, int]]] = [{e: (price(0, 0, e), 0) for e in range(1, n + 1)}]
    for stage in range(1, stages):
        best.append(
            {
                end: min((max(best[-1][start][0], price(stage, start, end)), start) for start in range(stage, end))
                for end in range(stage + 1, n + 1)
            }
        )
    cuts = [n]
    for stage in range(stages - 1, -1, -1):
        cuts.append(best[stage][cuts[-1]][1])
    return [end - start for start, end in pairwise(reversed(cuts))]


def stages_of_rank(rank: int, *, ranks: int, schedule: str) -> list[int]:
    """The stages that a rank of the pipeline axis holds, in the order of the model."""
    each, v_shaped = SCHEDULES[schedule]
    if v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(each)]


def bubble_share(schedule: str, *, ranks: int, microbatches: int) -> float:
    """The share of a step in which a rank has nothing to do, if forward takes 1, backward 2 and sending nothing.

    GPipe and 1F1B idle for p - 1 of m + p - 1 micro-batches' time, v interleaved stages a rank for 1/v of that
    (arXiv:2104.04473, section 2.2). The zero-bubble schedule fills it where there are 2p - 1 micro-batches or more
    (arXiv:2401.10241); with fewer, each one missing costs a slot.
    """
    if schedule == "zero_bubble":
        missing = max(0, 2 * ranks - 1 - microbatches)
        return missing / (missing + microbatches)
    idle = (ranks - 1) / SCHEDULES[schedule][0]
    return idle / (microbatches + idle)
