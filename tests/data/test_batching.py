import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature.data.batching import plan_batches
from armature.errors import ConfigError
from tests.running import python

number = st.integers(1, 64)


@pytest.mark.guarantee
@given(number, number, number)
def test_sizes_multiply_to_the_global_batch(micro, accumulate, ranks):
    batches = plan_batches(micro * accumulate * ranks, micro, ranks)
    assert (batches.micro_batch_size, batches.accumulate, batches.data_ranks) == (
        micro,
        accumulate,
        ranks,
    )


@given(number, number)
def test_auto_is_the_whole_share(micro, ranks):
    batches = plan_batches(micro * ranks, "auto", ranks)
    assert (batches.micro_batch_size, batches.accumulate) == (micro, 1)


@given(number, st.one_of(number, st.just("auto")), number)
def test_what_does_not_divide_names_values_that_do(global_batch, micro, ranks):
    try:
        plan_batches(global_batch, micro, ranks)
    except ConfigError as error:
        remedies = re.findall(r"data\.(global|micro)_batch_size=(\d+)(?= or |\.)", str(error))
        assert remedies
        for kind, value in remedies:
            plan_batches(
                *((int(value), micro) if kind == "global" else (global_batch, int(value))), ranks
            )


def test_checking_imports_no_torch():
    """These modules check the command line before anything heavy is imported; so does armature."""
    code = (
        "import armature.data.batching, armature.data.corpus, sys; assert armature.load; "
        "sys.exit('torch' in sys.modules)"
    )
    python("-c", code, PYTHONPATH="src")
