"""Weights that are used outside of their model's forward, with one element per rank.

torch takes a plain tensor of one element beside a sharded weight for the same on all ranks.
"""

import pytest

from tests import running
from tests.plain_parts import USES
from tests.plain_runs import PlainRuns

pytestmark = pytest.mark.slow
GUARANTEED = ("embedding", "bare_weight", "number")


@pytest.fixture(scope="module")
def runs(forks):
    return PlainRuns(forks)


def assert_same_under_fsdp(runs, *overrides):
    single, fsdp = (
        running.rows(runs.train(*overrides, layout=layout)[0]) for layout in ("single", "fsdp")
    )
    assert len(single) == len(fsdp) > 0
    for row, other in zip(single, fsdp, strict=True):
        assert row.keys() == other.keys()
        for column, value in row.items():
            if value:
                assert float(other[column]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), (
                    row["step"],
                    column,
                )


@pytest.mark.parametrize(
    "use",
    [pytest.param(use, marks=[pytest.mark.guarantee] if use in GUARANTEED else []) for use in USES],
)
def test_a_layer_called_apart_has_the_values_of_one_process(use, runs):
    assert_same_under_fsdp(runs, f"+task.use={use}", "data.eval_batch_size=1")


@pytest.mark.guarantee
def test_ranks_with_unequal_last_batches_make_the_same_calls(runs):
    assert_same_under_fsdp(runs, "+data.batch_size=4", "+data.held_out=7")


def test_numbers_of_averages_and_gradients_stay_as_they_are(runs):
    assert_same_under_fsdp(runs, "+task.average=tensor")
    assert_same_under_fsdp(runs, "task._target_=tests.plain_parts.ByHand")
