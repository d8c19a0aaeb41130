"""Train a model under several layouts in the environment that has transformers, and compare each
with one process.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any


def fit(layouts: Sequence[str], **job: Any) -> dict[str, Any]:
    """Return the losses of one process, and each layout's largest differences from it.

    Args:
        layouts: names in `harness.LAYOUTS`.
        job: values of a `harness.Job`.
    """
    from tests.support.parity import harness

    optimizer = {"lr": 1e-3, "eps": 1e-6}
    usual = replace(harness.LAYOUTS["single"], steps=4, global_batch=8, optimizer_args=optimizer)
    chosen = replace(usual, **job)
    single = harness.fit(chosen)
    found: dict[str, Any] = {"single": single.losses}
    for name in layouts:
        layout = harness.LAYOUTS[name]
        run = harness.fit(
            replace(chosen, strategy=layout.strategy, options=layout.options, ranks=layout.ranks)
        )
        found[name] = harness.difference(run, single)
    return found


def assert_equal(found: dict[str, Any], layouts: Sequence[str]) -> None:
    """What `fit` found: the model learns, and every layout trains as one process does."""
    assert found["single"][0] != found["single"][3]
    assert [*found] == ["single", *layouts]
    for name in layouts:
        assert max(found[name]["loss"], found[name]["weights"]) <= 1e-5, found
        assert found[name]["grad_norm"] <= 1e-4, (
            found
        )  # Gemma 2 caps its logits: 2e-5 with a tensor axis
