"""Which blocks each pipeline stage holds, and which stages each rank holds. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class Schedule(NamedTuple):
    """A pipeline's schedule, and how it assigns stages to ranks."""

    name: str
    stages_per_rank: int
    # the second stages run back along the ranks, so that the first rank holds the last stage too
    v_shaped: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Schedule:
        """Return the schedule that a strategy's options choose."""
        chosen = SCHEDULES[options["schedule"]]
        if chosen.name != INTERLEAVED:
            return chosen
        return chosen._replace(stages_per_rank=options["virtual_stages"])


INTERLEAVED = "interleaved_1f1b"
SCHEDULES = {
    "gpipe": Schedule("gpipe", 1),
    "1f1b": Schedule("1f1b", 1),
    INTERLEAVED: Schedule(INTERLEAVED, 2),
    "zero_bubble": Schedule("zero_bubble", 2, v_shaped=True),
}


def balance_blocks(costs: Sequence[int], *, stages: int, first: int, last: int) -> list[int]:
    """Return how many consecutive blocks each stage takes, so that the most expensive stage is as
    cheap as possible.

    `costs` are those of the blocks; `first` and `last` of what only the first and only the last
    stage hold.
    """
    n = len(costs)
    if n < stages:
        raise ValueError(f"{n} blocks cannot fill {stages} stages")
    sums = [0, *accumulate(costs)]

    def price(stage: int, start: int, end: int) -> int:
        return (
            sums[end]
            - sums[start]
            + (first if stage == 0 else 0)
            + (last if stage == stages - 1 else 0)
        )

    # best[s][e]: cost of the most expensive of stages 0 … s if they hold the first e blocks, and
    # where stage s starts
    best: list[dict[int, tuple[int, int]]] = [{e: (price(0, 0, e), 0) for e in range(1, n + 1)}]
    for stage in range(1, stages):
        best.append(
            {
                end: min(
                    (max(best[-1][start][0], price(stage, start, end)), start)
                    for start in range(stage, end)
                )
                for end in range(stage + 1, n + 1)
            }
        )
    cuts = [n]
    for stage in range(stages - 1, -1, -1):
        cuts.append(best[stage][cuts[-1]][1])
    return [end - start for start, end in pairwise(reversed(cuts))]


def stages_of_rank(rank: int, *, ranks: int, schedule: Schedule) -> list[int]:
    """Return the indices of the stages that a rank of the pipeline axis holds, in the order of the
    model.
    """
    if schedule.v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * i for i in range(schedule.stages_per_rank)]


def stage_ownership_problems(model: nn.Module) -> list[str]:
    """Return the problem that a model holds parameters itself: stages are made of submodules, so
    none owns them.
    """
    names = ", ".join(name for name, _ in model.named_parameters(recurse=False))
    problem = (
        f"{type(model).__name__} holds {names} itself, so no pipeline stage owns it. Put it into a "
        "submodule that the plan names in first or last."
    )
    return [problem] if names else []


def bubble_share(schedule: Schedule, *, ranks: int, microbatches: int) -> float:
    """Return the share of a step in which a rank is idle, if forward takes 1, backward 2 and
    communication no time.

    GPipe and 1F1B idle for p - 1 of m + p - 1 micro-batches' time (p ranks, m micro-batches); v
    interleaved stages per rank idle for 1/v of that (arXiv:2104.04473, section 2.2). The
    zero-bubble schedule has no idle time with 2p - 1 micro-batches or more (arXiv:2401.10241); with
    fewer, each missing micro-batch costs one slot.
    """
    if schedule.name == "zero_bubble":
        missing = max(0, 2 * ranks - 1 - microbatches)
        return missing / (missing + microbatches)
    idle = (ranks - 1) / schedule.stages_per_rank
    return idle / (microbatches + idle)
