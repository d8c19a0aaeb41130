import pytest
import torch

from armature.models.mixture.cost import cost
from armature.models.mixture.model import MixtureDecoder
from armature.models.mixture.plan import PLAN
from armature.parallel.mesh import AXES
from armature.parallel.pipeline import blocks_of_stages
from armature.parallel.split import SCHEDULES, bubble_share, stages_of_rank
from armature.planning.setup import Setup

DEEPER = SCHEDULES["interleaved_1f1b"]._replace(stages_per_rank=4)


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), DEEPER])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_stage_is_held_by_one_rank(schedule, ranks):
    held = [
        stage
        for rank in range(ranks)
        for stage in stages_of_rank(rank, ranks=ranks, schedule=schedule)
    ]
    assert sorted(held) == list(range(ranks * schedule.stages_per_rank))


def test_bubble_shrinks_from_schedule_to_schedule_and_with_more_microbatches():
    shares = [
        bubble_share(SCHEDULES[s], ranks=4, microbatches=8)
        for s in ("gpipe", "interleaved_1f1b", "zero_bubble")
    ]
    assert shares == pytest.approx([3 / 11, 1.5 / 9.5, 0.0])
    assert bubble_share(DEEPER, ranks=4, microbatches=8) == pytest.approx(0.75 / 8.75)
    assert bubble_share(SCHEDULES["1f1b"], ranks=4, microbatches=32) < bubble_share(
        SCHEDULES["1f1b"], ranks=4, microbatches=8
    )


@pytest.mark.parametrize(("active", "expected"), [(2, [1, 3, 3, 1]), (8, [2, 2, 2, 2])])
def test_stages_of_a_mixture_are_balanced_by_what_a_token_uses(active, expected):
    sizes = {"vocab_size": 512, "context": 16, "width": 32, "layers": 8, "heads": 4, "kv_heads": 2}
    sizes |= {"experts": 8, "active": active, "expert_hidden": 24}
    with torch.device("meta"):
        model = MixtureDecoder(**sizes)  # pyright: ignore[reportArgumentType]
    assert [len(names) for names in blocks_of_stages(model, PLAN, count=4)] == expected
    found = Setup(
        cost=cost(sizes), kind="mesh", axes=dict.fromkeys(AXES, 1) | {"pipe": 4}, world_size=4
    )
    assert list(found.blocks_by_rank) == expected
