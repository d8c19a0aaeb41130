"""A model that gives values that are not finite, for chosen samples on a chosen rank."""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armature.data.base import DataModule


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (bad,) = ctx.saved_tensors
        return torch.where(bad, torch.nan, gradient), None


class Fuse(nn.Module):
    """Breaks for rows whose id is one of `samples`, in `forward` or in `backward`; infinite for
    `inf`.
    """

    def __init__(self, samples: list[int], *, rank: int | None, kind: str) -> None:
        super().__init__()
        self.samples, self.kind = samples, kind
        self.here = rank is None or int(os.environ.get("RANK", "0")) == rank
        self.ids: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.ids is None or not self.here or not self.training:
            return x
        bad = torch.isin(self.ids, torch.tensor(self.samples, device=x.device)).unsqueeze(1)
        if self.kind == "backward":
            return BadGradient.apply(x, bad)  # pyright: ignore[reportReturnType]
        return torch.where(bad, torch.inf if self.kind == "inf" else torch.nan, x)


class Breaking(nn.Module):
    def __init__(self, *, dropout: float, samples: list[int], rank: int | None, kind: str) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.fuse = Fuse(samples, rank=rank, kind=kind)
        self.leave = nn.Sequential(nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        # the sample's number is its last input, so that the model knows it under every strategy
        self.fuse.ids = inputs[:, -1].round().long()
        outputs = self.leave(self.fuse(self.norm(self.enter(inputs / 10))))
        if targets is None:
            return outputs
        return F.cross_entropy(outputs, targets)


class Numbered(torch.utils.data.Dataset):
    def __init__(self, size: int, broken: list[int]) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
        inputs[-1] = index
        if index in self.broken:
            inputs[0] = torch.nan
        return {"inputs": inputs, "targets": torch.tensor(index % 4), "ids": torch.tensor(index)}


class NumberedData(DataModule):
    """`broken`: samples that hold NaN."""

    def __init__(self, *, samples: int, broken: list[int], **loader) -> None:
        super().__init__(**loader)
        self.samples, self.broken = samples, broken

    def dataset(self, split):
        return Numbered(self.samples, self.broken if split == "train" else [])
