"""Which blocks each pipeline stage holds, and which stages each rank holds. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
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
    if (n := len(costs)) < stages:
        raise ValueError(f"{n} blocks cannot fill {stages} stages")
    # each stage holds a block: the first and the last one bring the ends
    costs = [*costs]
    costs[0] += first
    costs[-1] += last
    sums = [0, *accumulate(costs)]

    @cache
    def best(stages: int, end: int) -> tuple[int, list[int]]:
        """Return the cost of the most expensive of so many stages, if they hold the first `end`
        blocks, and how many each takes.
        """
        if stages == 1:
            return sums[end], [end]
        cost, start = min(
            (max(best(stages - 1, start)[0], sums[end] - sums[start]), start)
            for start in range(stages - 1, end)
        )
        return cost, [*best(stages - 1, start)[1], end - start]

    return best(stages, n)[1]


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
