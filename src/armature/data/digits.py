"""Handwritten digits: 1,797 images of 8 × 8 pixels, in digits.csv.gz beside this file.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository (1998), CC BY 4.0; the part, and the file, that scikit-learn's `load_digits` reads: 64
values from 0 to 16 and the digit per row.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data.base import Batch, DataModule, Split
from armature.data.table import Rows

FILE = Path(__file__).with_name("digits.csv.gz")
_HELD_OUT = 10  # a tenth of each digit's images for val, and a tenth for test


class DigitsData(DataModule):
    """Images (B, 1, 8, 8) with values in [0, 1], and digits (B,).

    The split is fixed, with the same digit mix in each.

    Args:
        fold, folds: which of so many parts of all but the test images is held out for val.
        shift: move training images by up to this many pixels in each direction; 0: do not move
            them.
    """

    # read before launch
    model_sizes: ClassVar[dict[str, int]] = {"image_size": 8, "channels": 1, "classes": 10}

    def __init__(
        self, *, shift: int = 1, fold: int | None = None, folds: int | None = None
    ) -> None:
        super().__init__()
        self.shift, self.fold, self.folds = shift, fold, folds

    @override
    def dataset(self, split: Split) -> Dataset[Any]:
        images, digits = load_digits()
        chosen = split_indices(digits, fold=self.fold, folds=self.folds)[split]
        inputs = torch.tensor(images[chosen] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
        return Images(inputs, torch.tensor(digits[chosen], dtype=torch.int64), shift=self.shift)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 64) with values from 0 to 16, and digits (1797,)."""
    rows = np.loadtxt(FILE, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)


def split_indices(
    digits: np.ndarray, *, fold: int | None = None, folds: int | None = None
) -> dict[Split, np.ndarray]:
    """Return the indices of each split's images, drawn digit by digit. They never change."""
    # the same numbers in every version of numpy, unlike default_rng
    draw = np.random.RandomState(0)
    parts: dict[Split, list[np.ndarray]] = {"train": [], "val": [], "test": []}
    for digit in np.unique(digits):
        indices = draw.permutation(np.flatnonzero(digits == digit))
        share = len(indices) // _HELD_OUT
        held_out = np.s_[:share] if fold is None else np.s_[fold::folds]
        parts["test"].append(indices[share : 2 * share])
        indices = np.delete(indices, np.s_[share : 2 * share])
        parts["val"].append(indices[held_out])
        parts["train"].append(np.delete(indices, held_out))
    return {split: np.sort(np.concatenate(indices)) for split, indices in parts.items()}


class Images(Rows):
    """Images and classes in memory.

    `augment` moves an image by whole pixels, and fills up with zeros.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, *, shift: int) -> None:
        super().__init__(inputs, targets)
        self.shift = shift

    def augment(self, sample: Batch, generator: torch.Generator) -> Batch:
        if self.shift == 0:
            return sample
        down, right = torch.randint(0, 2 * self.shift + 1, (2,), generator=generator).tolist()
        height, width = sample["inputs"].shape[-2:]
        padded = F.pad(sample["inputs"], (self.shift,) * 4)
        return {**sample, "inputs": padded[..., down : down + height, right : right + width]}
