"""Data whose samples cost CPU time: images that are decompressed, cropped and reduced, like
JPEGs.
"""

import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from armature.data.base import Batch, DataModule, Split

SIDE, SHOWN = 256, 32  # pixels per side, as stored and as returned
KEPT = 64  # images in memory, which are returned repeatedly
SIZE = 100_000  # samples per epoch


class Images(Dataset[Batch]):
    """About a dozen milliseconds per sample: decompression without a lock, a crop, and a
    reduction.
    """

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        coarse = draw.integers(0, 256, (KEPT, SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
        self.stored = [
            zlib.compress(np.kron(image, np.ones((4, 4, 1), np.uint8)).tobytes())
            for image in coarse
        ]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Batch:
        pixels = np.frombuffer(zlib.decompress(self.stored[index % KEPT]), np.uint8).reshape(
            SIDE, SIDE, 3
        )
        return {
            "inputs": torch.from_numpy(pixels.copy()).permute(2, 0, 1),
            "targets": torch.tensor(index % 10),
        }

    def augment(self, sample: Batch, generator: torch.Generator) -> Batch:
        image: Tensor = sample["inputs"]
        side = int(torch.randint(SIDE // 2, SIDE + 1, (), generator=generator))
        top, left = (
            int(torch.randint(0, SIDE - side + 1, (), generator=generator)) for _ in range(2)
        )
        crop = image[:, top : top + side, left : left + side].float()[None] / 255
        small = F.interpolate(crop, size=(SHOWN, SHOWN), mode="bilinear", antialias=True)[0]
        return {**sample, "inputs": small}


class ImagesData(DataModule):
    """The same images for every split."""

    def dataset(self, split: Split) -> Images:
        return Images()
