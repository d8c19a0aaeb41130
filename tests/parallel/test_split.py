from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armature.models.mixture.cost import cost
from armature.models.mixture.model import MixtureDecoder
from armature.models.mixture.plan import PLAN
from armature.parallel.mesh import AXES
from armature.parallel.pipeline import blocks_of_stages
from armature.parallel.split import SCHEDULES, balance_blocks, bubble_share, stages_of_rank
from armature.planner.setup import Setup


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    stages=st.integers(1, 5),
    first=st.integers(0, 60),
    last=st.integers(0, 60),
)
def test_no_other_split_has_a_cheaper_largest_stage(
    costs: list[int], stages: int, first: int, last: int
) -> None:
    if len(costs) < stages:
        with pytest.raises(ValueError, match="cannot fill"):
            balance_blocks(costs, stages=stages)
        return

    def most_expensive(sizes: list[int]) -> int:
        starts = [sum(sizes[:i]) for i in range(stages)]
        prices = [sum(costs[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
        prices[0] += first
        prices[-1] += last
        return max(prices)

    def cuts(n: int, parts: int) -> list[list[int]]:
        return (
            [[n]]
            if parts == 1
            else [[k, *rest] for k in range(1, n - parts + 2) for rest in cuts(n - k, parts - 1)]
        )

    sizes = balance_blocks(costs, stages=stages, first=first, last=last)
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    assert most_expensive(sizes) == min(most_expensive(other) for other in cuts(len(costs), stages))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_stage_is_held_by_one_rank(schedule: str, ranks: int) -> None:
    held = [
        stage
        for rank in range(ranks)
        for stage in stages_of_rank(rank, ranks=ranks, schedule=schedule)
    ]
    assert sorted(held) == list(range(ranks * SCHEDULES[schedule][0]))


def test_bubble_shrinks_from_schedule_to_schedule_and_with_more_microbatches() -> None:
    shares = [
        bubble_share(s, ranks=4, microbatches=8)
        for s in ("gpipe", "interleaved_1f1b", "zero_bubble")
    ]
    assert shares == pytest.approx([3 / 11, 1.5 / 9.5, 0.0])
    assert bubble_share("1f1b", ranks=4, microbatches=32) < bubble_share(
        "1f1b", ranks=4, microbatches=8
    )


@pytest.mark.parametrize(("active", "expected"), [(2, [1, 3, 3, 1]), (8, [2, 2, 2, 2])])
def test_stages_of_a_mixture_are_balanced_by_what_a_token_uses(
    active: int, expected: list[int]
) -> None:
    sizes = {"vocab_size": 512, "context": 16, "width": 32, "layers": 8, "heads": 4, "kv_heads": 2}
    sizes |= {"experts": 8, "active": active, "expert_hidden": 24}
    with torch.device("meta"):
        model = MixtureDecoder(**sizes)  # pyright: ignore[reportArgumentType]
    assert [len(names) for names in blocks_of_stages(model, PLAN, count=4)] == expected
    setup = Setup(
        cost=cost(sizes), kind="mesh", axes=dict.fromkeys(AXES, 1) | {"pipe": 4}, world_size=4
    )
    assert list(setup.blocks_by_stage) == expected
