"""Whether samples that are read twice, or on two ranks, are the same."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# values of an array, and leaves of a sample, that a sketch has, at most twice as many
_THINNED = 1024
_EXACT_BYTES = 4  # of integers, at least
_WORDS_OF_A_NAME = 2  # at most
_ROUNDING = 0.02  # of the largest value


def alike(first: Any, again: Any) -> bool:
    """Return whether samples hold the same tensors, arrays and plain values; other objects are not
    compared.
    """
    leaves, others = tree_leaves(first), tree_leaves(again)
    return len(leaves) == len(others) and all(map(_equal, leaves, others))


def digest(sample: Any) -> int:
    """Return 63 bits that are the same in each process for the same tensors, arrays and plain
    values.

    Other objects count by their type.
    """
    checksum = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(sample):
        checksum.update(f"/{type(leaf).__name__} ".encode())
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized:
            checksum.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
            leaf = (
                leaf.detach()
                .resolve_conj()
                .resolve_neg()
                .cpu()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            checksum.update(f"{leaf.dtype} {leaf.shape} ".encode())
            checksum.update(np.ascontiguousarray(leaf).data)
        elif isinstance(leaf, int | float | str | bytes | np.generic):
            checksum.update(repr(leaf).encode())
    return int.from_bytes(checksum.digest(), "little") >> 1


def sketch(sample: Any) -> list[Any]:
    """Return plain values that tell a sample from another one on another machine: `near` compares
    them.

    Beside numbers, a string of one or two words is left out: it may be a name or an id that each
    process makes anew.
    """
    leaves = tree_leaves(sample)
    values = [_thinned(leaf) for leaf in leaves[:: max(1, len(leaves) // _THINNED)]]
    if any(isinstance(value, tuple) for value in values):
        values = [
            value
            for value in values
            if not isinstance(value, str) or len(value.split()) > _WORDS_OF_A_NAME
        ]
    return [len(leaves), *values]


def near(one: list[Any], two: list[Any]) -> bool:
    """Return whether sketches are alike but for rounding: processors of two kinds decode and resize
    unlike.

    Integers of 32 bits and more are equal: classes, tokens and times. Shorter ones are mostly
    pixels and sound.
    """
    return len(one) == len(two) and all(map(_near, one, two))


def _thinned(leaf: Any) -> Any:
    if isinstance(leaf, str):
        return leaf.rpartition("/")[2]  # the folder of a file may be another one on another machine
    if isinstance(leaf, bytes):
        return leaf[:_THINNED]
    try:
        if isinstance(leaf, Tensor):
            flat = leaf.detach().reshape(-1)
            kept = flat[:: max(1, len(flat) // _THINNED)].cpu()
            exact = (
                not (kept.is_floating_point() or kept.is_complex())
                and kept.element_size() >= _EXACT_BYTES
            )
            kept = torch.view_as_real(kept.resolve_conj()) if kept.is_complex() else kept
            values = (kept if exact else kept.double()).numpy()
        else:
            flat = np.asarray(leaf).reshape(-1)
            kept = flat[:: max(1, len(flat) // _THINNED)]
            exact = kept.dtype.kind in "iu" and kept.itemsize >= _EXACT_BYTES
            values = kept if exact else np.stack([np.real(kept), np.imag(kept)]).astype(np.float64)
        return tuple(getattr(leaf, "shape", ())), values.reshape(-1).tolist()
    except Exception:  # no numbers
        return type(leaf).__name__


def _near(one: Any, two: Any) -> bool:
    if (
        not (isinstance(one, tuple) and isinstance(two, tuple))
        or one[0] != two[0]
        or len(one[1]) != len(two[1])
    ):
        return one == two
    values, others = np.array(one[1]), np.array(two[1])
    if values.dtype.kind in "iu" or others.dtype.kind in "iu":
        return one == two
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return bool(np.allclose(values, others, rtol=0.0, atol=_ROUNDING * largest, equal_nan=True))


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
