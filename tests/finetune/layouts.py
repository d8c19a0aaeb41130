"""Train a model under several layouts in the environment that has transformers, and compare each
with one process.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any


def fit(chosen: Any, layouts: Sequence[str], out: Path) -> None:
    """Write the losses of one process, and each layout's largest differences from it, after each
    layout.

    Args:
        chosen: a `harness.Job` of one process.
        layouts: names in `harness.LAYOUTS`.
    """
    from tests.support.parity import harness

    single = harness.fit(chosen)
    found: dict[str, Any] = {"single": single.losses}
    for name in layouts:
        layout = harness.LAYOUTS[name]
        run = harness.fit(
            replace(chosen, strategy=layout.strategy, options=layout.options, ranks=layout.ranks)
        )
        found[name] = harness.difference(run, single)
        out.write_text(json.dumps(found, indent=1))


def assert_equal(out: Path, layouts: Sequence[str]) -> None:
    """What `fit` wrote: the model learns, and every layout trains as one process does."""
    found = json.loads(out.read_text())
    assert found["single"][0] != found["single"][3]
    assert [*found] == ["single", *layouts]
    for name in layouts:
        assert max(found[name]["loss"], found[name]["weights"]) <= 1e-5, found
        assert found[name]["grad_norm"] <= 1e-4, (
            found
        )  # Gemma 2 caps its logits: 2e-5 with a tensor axis
