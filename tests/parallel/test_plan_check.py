from dataclasses import replace
from functools import partial

import pytest

from armature.models.decoder.model import Decoder
from armature.models.decoder.plan import PLAN
from armature.parallel import plan_check

SIZES = {"pipe": 2, "replicate": 1, "shard": 1, "context": 1, "tensor": 2}
make = partial(Decoder, vocab_size=96, context=16, width=32, layers=4, heads=4)


def test_a_plan_that_fits_has_no_problem():
    assert plan_check.problems(make, PLAN, SIZES) == []


@pytest.mark.parametrize(
    ("plan", "sizes", "message"),
    [
        (
            {"tensor": {**PLAN.tensor, "blocks.*.mlp": "column"}},
            {},
            "'blocks.*.mlp' matches no module of Decoder",
        ),
        ({"blocks": "layers"}, {}, "blocks='layers'"),
        ({"last": ("final",)}, {}, "last='final'"),
        ({}, {"tied": True}, "embed.weight and head.weight are one parameter"),
        ({}, {"vocab_size": 97}, "dim 0 of embed.weight (97, 32)"),
    ],
)
def test_what_does_not_fit_is_named(plan, sizes, message):
    problems = plan_check.problems(partial(make, **sizes), replace(PLAN, **plan), SIZES)
    assert message in "\n".join(problems)
