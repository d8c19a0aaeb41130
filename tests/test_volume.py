"""Bytes that a rank sends, counted in real runs of two processes, against the sums that they must
be.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.building import decoder_on_meta, parallelize
from tests.support.parity.harness import DECODER, on_ranks
from tests.support.volume import CollectiveCounter

MICRO_BATCHES, BATCH = 3, 6
FP32 = 4  # bytes


def count(*, steps: int = 2, optimizer: str | None = None, **axes: int) -> dict[str, Any]:
    """Return the collectives of the last step of this rank, and the bytes of its hidden
    matrices.
    """
    from armature.optim.groups import parameter_groups
    from armature.optim.muon import Muon
    from armature.parallel.distributed_matrices import DistributedMatrices

    model = decoder_on_meta(**DECODER)
    parallelize(
        model, axes=axes, prefix="", microbatches=MICRO_BATCHES, reshard_after_forward=False
    )
    muon = Muon(parameter_groups(model), precision="32-true")
    muon.matrix_work = DistributedMatrices()
    tokens = torch.randint(0, DECODER["vocab_size"], (BATCH, DECODER["context"]))
    for step in range(steps):
        counter = CollectiveCounter()
        model(tokens, tokens).backward()
        with counter:
            if step == steps - 1 and "pipe" in axes:
                model(tokens, tokens).backward()
            if "shard" in axes:
                muon.step()
    hidden = [param for group in muon.param_groups if group["hidden"] for param in group["params"]]
    matrices = sum(getattr(param, "_local_tensor", param).numel() for param in hidden) * FP32
    return {
        "collectives": counter.collectives,
        "matrices": matrices,
        "shapes": [tuple(p.shape) for p in hidden],
    }


def sums(result: dict[str, Any]) -> dict[str, int]:
    kinds = {each["kind"] for each in result["collectives"]}
    return {
        kind: sum(c["bytes"] for c in result["collectives"] if c["kind"] == kind) for kind in kinds
    }


def both() -> list[dict[str, Any]]:
    return [count(shard=2), count(pipe=2)]


@pytest.mark.slow
def test_all_to_alls_and_sends_are_counted_to_the_byte():
    for muon, pipeline in on_ranks(both, ranks=2):
        assert len(muon["shapes"]) % 2 == 0
        assert sums(muon) == {"all_to_all": 2 * muon["matrices"]}, (
            "to the rank that works on it, and back"
        )
        micro_batch = BATCH // MICRO_BATCHES * DECODER["context"] * DECODER["width"] * FP32
        assert sums(pipeline)["send"] == MICRO_BATCHES * micro_batch
        assert sums(pipeline)["broadcast"] == FP32, "the loss"
