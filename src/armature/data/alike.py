"""Whether samples that are read twice are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves


def alike(first: Any, again: Any) -> bool:
    """Return whether samples hold the same tensors, arrays and plain values; other objects are not compared."""
    leaves, others = tree_leaves(first), tree_leaves(again)
    return len(leaves) == len(others) and all(map(_equal, leaves, others))


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, int | str | bytes):
        return type(one) is not type(two) or one == two
    if isinstance(one, float | np.ndarray | Tensor) and type(one) is type(two):
        try:
            same = (one == two) | ((one != one) & (two != two))  # a NaN is the same as another
            return bool(same if isinstance(same, bool) else same.all())
        except Exception:  # of other shapes, or of a layout that torch does not compare
            return getattr(one, "shape", None) == getattr(two, "shape", None)
    return True
