"""Packed conversations, of which some targets are not learned, train under every layout as in one process."""

from dataclasses import replace

import pytest

from benchmarks.parity.harness import LAYOUTS, Job, difference, fit_once

ADAPTER = {"rank": 4, "alpha": 8.0}


def packed(name: str, adapter: dict | None, **changes) -> Job:
    return replace(LAYOUTS[name], **{"adapter": adapter, "ignore": True, "packed": True, "steps": 6, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", ["fsdp 2", "tensor 2, sequence parallel", "fsdp 2 × tensor 2"])
def test_packed_conversations_train_as_in_one_process(name, adapter):
    single = fit_once(packed("single", adapter, accumulate=1))
    assert max(difference(fit_once(packed(name, adapter)), single).values()) <= 1e-5
    if name == "fsdp 2":  # the documents matter
        mixed = fit_once(packed("single", adapter, accumulate=1, packed=False))
        assert abs(mixed.losses[0] - single.losses[0]) > 1e-3
