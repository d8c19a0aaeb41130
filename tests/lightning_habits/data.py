"""Small data sets: a sample is a function of its index alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from armature.data.base import DataModule


def generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def regression(index: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, generator=generator(index))
    return x, x[:3].sum().sin().reshape(1)


def image(index: int) -> tuple[Tensor, int]:
    label = index % 4
    x = 1.5 * torch.randn(1, 8, 8, generator=generator(index))
    x[0, 2 * label : 2 * label + 2] += 1
    return x, label


def mask(index: int) -> dict[str, Tensor]:
    x, label = image(index)
    target = torch.zeros(8, 8, dtype=torch.long)
    target[2 * label : 2 * label + 2] = 1
    return {"image": x, "mask": target}


def views(index: int) -> tuple[tuple[Tensor, Tensor], int]:
    x, label = image(index)
    noise = torch.randn(2, *x.shape, generator=generator(1000 + index))
    return (x + 0.1 * noise[0], x + 0.1 * noise[1]), label


def tokens(index: int) -> dict[str, Tensor]:
    start = int(torch.randint(0, 16, (1,), generator=generator(index)))
    ids = (start + 3 * torch.arange(12)) % 16
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def ragged(index: int) -> tuple[Tensor, int]:
    x = torch.randn(2 + index % 5, 3, generator=generator(index))
    return x, int(x.mean() > 0)


def pack(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """collate_fn: sequences padded to the longest of the batch, lengths, labels."""
    xs = [x for x, _ in samples]
    lengths, labels = torch.tensor([len(x) for x in xs]), torch.tensor([y for _, y in samples])
    return pad_sequence(xs, batch_first=True), lengths, labels


class Samples(Dataset):
    def __init__(self, sample: Callable[[int], Any], indices: range) -> None:
        self.sample, self.indices = sample, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.sample(self.indices[index])


class Batched(Samples):
    """Serves whole batches, which is how a data module of ours collates."""

    def batch(self, indices):
        return pack([self[index] for index in indices])


SAMPLES: dict[str, Callable[[int], Any]] = {
    "regression": regression,
    "images": image,
    "masks": mask,
    "views": views,
    "tokens": tokens,
    "ragged": ragged,
}
# 6 batches of 8 per epoch
RANGES = {"train": range(48), "val": range(100, 116), "test": range(200, 216)}


class SampleData(DataModule):
    def __init__(self, *, samples: str, **loader: Any) -> None:
        super().__init__(**loader)
        self.samples = samples

    def dataset(self, split):
        sample = SAMPLES[self.samples]
        return (Batched if sample is ragged else Samples)(sample, RANGES[split])
