"""Whether samples that are read twice, or on two ranks, are the same."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def alike(first: Any, again: Any) -> bool:
    """Return whether samples hold the same tensors, arrays and plain values; other objects are not compared."""
    leaves, others = tree_leaves(first), tree_leaves(again)
    return len(leaves) == len(others) and all(map(_equal, leaves, others))


def digest(sample: Any) -> int:
    """Return 63 bits that are the same in each process for the same tensors, arrays and plain values.

    Other objects count by their type.
    """
    checksum = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(sample):
        checksum.update(f"/{type(leaf).__name__} ".encode())
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized:
            checksum.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            leaf = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            checksum.update(f"{leaf.dtype} {leaf.shape} ".encode())
            checksum.update(np.ascontiguousarray(leaf).data)
        elif isinstance(leaf, int | float | str | bytes | np.generic):
            checksum.update(repr(leaf).encode())
    return int.from_bytes(checksum.digest(), "little") >> 1


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
