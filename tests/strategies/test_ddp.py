from __future__ import annotations

import pytest

from tests.support.parity.harness import Job, difference, fit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"find_unused_parameters": True, "gradient_as_bucket_view": False}, 1e-5),
        ({"comm_hook": "bf16"}, 2e-2),
        ({"comm_hook": "fp16"}, 2e-2),
    ],
)
def test_options_change_the_way_and_not_the_result(options: dict, tolerance: float) -> None:
    far = difference(fit(Job("DDP", options, ranks=2)), fit(Job("SingleDevice")))
    assert max(far.values()) <= tolerance, far


@pytest.mark.slow
def test_each_rank_sends_what_the_hook_rounds() -> None:
    exact, rounded = fit(Job("DDP", ranks=2)), fit(Job("DDP", {"comm_hook": "bf16"}, ranks=2))
    assert (
        difference(rounded, exact)["grad_norm"] > 1e-6
    )  # a hook that is ignored would pass every other test
