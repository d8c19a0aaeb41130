from __future__ import annotations

from dataclasses import replace
from functools import partial

from armature.models.decoder.model import Decoder
from armature.models.decoder.plan import PLAN
from armature.parallel import plan_check

SIZES = {"pipe": 2, "replicate": 1, "shard": 1, "context": 1, "tensor": 2}
make = partial(Decoder, vocab_size=96, context=16, width=32, layers=4, heads=4)


def test_a_plan_that_fits_has_no_problem() -> None:
    assert plan_check.problems(make, PLAN, SIZES) == []


def test_a_pattern_that_matches_nothing_is_named() -> None:
    (problem,) = plan_check.problems(
        make, replace(PLAN, tensor={**PLAN.tensor, "blocks.*.mlp": "column"}), SIZES
    )
    assert "'blocks.*.mlp' matches no module of Decoder" in problem


def test_blocks_and_ends_that_are_not_there_are_named() -> None:
    assert "blocks='layers'" in plan_check.problems(make, replace(PLAN, blocks="layers"), SIZES)[0]
    assert "last='final'" in plan_check.problems(make, replace(PLAN, last=("final",)), SIZES)[0]


def test_a_parameter_shared_by_two_stages_is_named() -> None:
    (problem,) = plan_check.problems(partial(make, tied=True), PLAN, SIZES)
    assert "embed.weight and head.weight are one parameter" in problem


def test_a_matrix_that_the_axis_does_not_divide_is_named() -> None:
    problems = plan_check.problems(partial(make, vocab_size=97), PLAN, SIZES)
    assert any("dim 0 of embed.weight (97, 32)" in problem for problem in problems)
