"""Divide samples into train, val and test, the same on every machine. Torch-free."""

import numpy as np
from numpy.typing import NDArray

from armature.data.sampler import permuted
from armature.errors import ConfigError


def split_indices(size: int, *, val_fraction: float, test_fraction: float) -> dict[str, NDArray[np.int64]]:
    """Return the indices of each split, drawn at random but always alike; "predict" has all.

    Raises ConfigError if a fraction is out of range, or nothing is left for training.
    """
    fractions = (val_fraction, test_fraction)
    if min(fractions) < 0 or sum(fractions) >= 1:
        raise ConfigError(
            f"data.val_fraction={val_fraction} and data.test_fraction={test_fraction}: each must be 0 or more, and "
            "together below 1."
        )
    val, test = (round(size * fraction) for fraction in fractions)
    if size - val - test < 1:
        raise ConfigError(f"{size} samples leave none for training: lower data.val_fraction={val_fraction}.")
    order = permuted(np.arange(size), size=size, seed="split", epoch=0)
    parts = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
    return {"predict": np.arange(size), **{name: np.sort(part) for name, part in parts.items()}}
