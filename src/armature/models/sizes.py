"""Size checks that the models' own checks share. Torch-free, like them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

LARGEST = 2**24  # of a size; no model comes near it, and checks may count up to one
FEWER = {"layers": 10_000, "image_size": 2**16, "experts": 2**16}


def whole_numbers(
    args: Mapping[str, Any], names: Iterable[str], *, optional: Iterable[str] = ()
) -> list[str]:
    """Return a problem for each named argument that is given and is not a whole number of at least
    1.
    """
    problems = []
    for name in names:
        value = args.get(name)
        if value is None and (name in optional or name not in args):
            continue
        most = FEWER.get(name, LARGEST)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"model.{name} must be a whole number of at least 1. Got {value!r}")
        elif value > most:
            problems.append(f"model.{name} must be at most {most}. Got {value}")
    return problems


def fraction(args: Mapping[str, Any], name: str) -> list[str]:
    """Return a problem if the named argument is given and is not at least 0 and below 1."""
    value = args.get(name, 0.0)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < 1.0:
        return []
    return [f"model.{name} must be at least 0 and below 1. Got {value!r}"]


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`."""
    pairs = ((d, number // d) for d in range(1, math.isqrt(number) + 1) if number % d == 0)
    return min(sorted(d for pair in pairs for d in pair), key=lambda d: abs(d - wanted))


def nearest_multiple(number: int, factor: int) -> int:
    """Return the multiple of `factor`, at least `factor` itself, that is nearest to `number`."""
    return max(1, round(number / factor)) * factor
