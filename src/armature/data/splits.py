"""Divide samples into train, val and test, the same on every machine. Torch-free."""

import functools
import logging

import numpy as np
from numpy.typing import NDArray

from armature.data.sampler import permuted
from armature.errors import ConfigError

log = logging.getLogger(__name__)


def split_indices(
    size: int, *, val_fraction: float, test_fraction: float
) -> dict[str, NDArray[np.int64]]:
    """Return the indices of each split, drawn at random but always alike; "predict" has all.

    Raises ConfigError if a fraction is out of range, or nothing is left for training.
    """
    fractions = (val_fraction, test_fraction)
    if min(fractions) < 0 or sum(fractions) >= 1:
        raise ConfigError(
            f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction}: each must "
            "be 0 or more, and "
            "together below 1."
        )
    val, test = (round(size * fraction) for fraction in fractions)
    if size - val - test < 1:
        raise ConfigError(
            f"{size} samples leave none for training: lower data.val_fraction={val_fraction}."
        )
    for key, fraction, held_out in (
        ("val_fraction", val_fraction, val),
        ("test_fraction", test_fraction, test),
    ):
        if fraction and not held_out:
            _report_empty(key, fraction, size)
    order = permuted(np.arange(size), size=size, seed="split", epoch=0)
    parts = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
    return {"predict": np.arange(size), **{name: np.sort(part) for name, part in parts.items()}}


@functools.cache  # each split asks for the indices of all
def _report_empty(key: str, fraction: float, size: int) -> None:
    log.warning(
        "data.%s=%s of %d samples is none: there is nothing to measure on. Type data.%s=%.2g or "
        "more, or 0 to hold out "
        "none.", key, fraction, size, key, 1 / size,
    )  # fmt: skip
