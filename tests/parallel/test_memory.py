"""A sharded model is built without any rank ever holding the whole model."""

import resource
from typing import Any

import pytest

from tests.parallel.building import decoder_on_meta, parallelize
from tests.support.parity.harness import on_ranks

MODEL = {"vocab_size": 8192, "context": 128, "width": 512, "layers": 16, "heads": 8}


def build(model_args: dict[str, Any], shard: int) -> tuple[int, int, int]:
    """Return the bytes of the model, of its largest parameter, and by which building raised this
    rank's peak.
    """
    model = decoder_on_meta(**model_args)
    whole = sum(p.numel() for p in model.parameters()) * 4
    largest = max(p.numel() for p in model.parameters()) * 4
    before = peak()
    parallelize(model, axes={"shard": shard})
    return whole, largest, peak() - before


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
def test_a_rank_needs_its_shard_and_one_parameter_to_build_a_model():
    ranks = 4
    for whole, largest, grew in on_ranks(build, MODEL, ranks, ranks=ranks):
        assert grew < whole / ranks + 3 * largest, (whole, largest, grew)
