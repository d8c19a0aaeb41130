"""Weights that are used outside of their model's forward, with one element per rank.

torch takes a plain tensor of one element beside a sharded weight for the same on all ranks.
"""

import pytest

from tests.lightning_habits.compare import differences

pytestmark = [pytest.mark.slow, pytest.mark.guarantee]
ONE = "data.eval_batch_size=1"


@pytest.mark.parametrize(
    ("typed", "of_fsdp"),
    [
        (["+task.use=embedding", ONE], ["strategy.min_num_params=0"]),  # a unit, called apart
        (["+task.use=bare_weight", ONE], []),
        (["+task.use=number", ONE], []),
        (["+data.batch_size=4", "+data.held_out=7"], []),  # unequal last batches
    ],
)
def test_layers_called_apart_compute_what_one_process_does(typed, of_fsdp, runs):
    single, _ = runs.train(*typed)
    fsdp, _ = runs.train(*typed, *of_fsdp, layout="fsdp")
    assert not (found := differences(fsdp, single)), found
