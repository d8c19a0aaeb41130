"""Size checks that models' own checks share. Torch-free, like them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


def whole_numbers(args: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a problem for each named argument that is given and is not a whole number of at least
    1.
    """
    problems = []
    for name in names:
        value = args.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"model.{name} must be a whole number of at least 1. Got {value!r}")
    return problems


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`."""
    pairs = ((d, number // d) for d in range(1, math.isqrt(number) + 1) if number % d == 0)
    return min(sorted(d for pair in pairs for d in pair), key=lambda d: abs(d - wanted))


def nearest_multiple(number: int, factor: int) -> int:
    """Return the multiple of `factor`, at least `factor` itself, that is nearest to `number`."""
    return max(1, round(number / factor)) * factor
