"""Two interleaving half circles of noisy points, one circle per class."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data.base import DataModule, Split

SEEDS: dict[Split, int] = {"train": 0, "val": 1, "test": 2}


class Moons(Dataset[dict[str, Tensor]]):
    """A map-style dataset: `len` and one sample by its index."""

    def __init__(self, samples: int, *, noise: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.arange(samples) % 2
        angle = math.pi * torch.rand(samples, generator=generator)
        upper = torch.stack([angle.cos(), angle.sin()], dim=1)
        lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
        points = torch.where(self.targets[:, None] == 0, upper, lower)
        self.inputs = points + noise * torch.randn(samples, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """Return a whole batch at once.

        Optional: without it, samples are fetched one by one and stacked.
        """
        return {"inputs": self.inputs[indices], "targets": self.targets[indices]}


class MoonsData(DataModule):
    """Points (B, 2) and classes (B,).

    The base class shuffles, batches, shares samples among ranks, and holds the position to resume
    from.
    """

    model_sizes: ClassVar[dict[str, int]] = {
        "features": 2,
        "classes": 2,
    }  # what a model needs, checked before launch

    def __init__(self, *, samples: int, held_out: int, noise: float) -> None:
        super().__init__()
        self.samples, self.held_out, self.noise = samples, held_out, noise

    @override
    def dataset(self, split: Split) -> Moons:
        samples = self.samples if split == "train" else self.held_out
        return Moons(samples, noise=self.noise, seed=SEEDS[split])
