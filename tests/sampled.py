"""Of many cases of one kind `make test` runs some, spread evenly; `make test-all` runs all."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int, *, guarantee: bool = False) -> list[Any]:
    """Return the cases, all but about `count` of them marked as slow.

    Args:
        cases: a value each, or a tuple of values for as many names, as `parametrize` takes them.
        guarantee: the others hold the contract.
    """
    cases = [*cases]
    step = max(1, len(cases) // count)
    kept = [pytest.mark.guarantee] if guarantee else []
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=kept if i % step == 0 else [pytest.mark.slow],
        )
        for i, case in enumerate(cases)
    ]
