"""Made-up samples of the model's sizes: for simulations, and to try a model's speed without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data.base import Batch, DataModule, Split
from armature.errors import ConfigError


class Vocabulary:
    """The number of different tokens."""

    def __init__(self, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prepare(self) -> None:
        """There is nothing to prepare."""


class SyntheticData(DataModule):
    """Random tokens, or random images with random classes. Every sample depends on the seed and its index alone.

    Args:
        source: how many different tokens there are.
        context: tokens per sample, unless image_size is given.
        image_size, channels, classes: of images (channels, image_size, image_size).
        samples: in the train split; val and test have a hundredth of it, and at least one batch of 64.
        loader: batch sizes and the other arguments of DataModule.
    """

    def __init__(
        self, *, source: Vocabulary, context: int, image_size: int | None = None,
        channels: int | None = None, classes: int | None = None, samples: int = 1_000_000, **loader: Any,
    ) -> None:  # fmt: skip
        super().__init__(**loader)
        images = (image_size, channels, classes)
        if any(images) and not all(images):
            raise ConfigError(
                f"data.image_size={image_size}, data.channels={channels}, data.classes={classes}: data=synthetic makes "
                "images if it has all three sizes, and tokens if it has none. Type all, or null for each."
            )
        self.tokens_per_sample = None if image_size else context
        self.context, self.vocab_size, self.samples = context, source.vocab_size, samples
        self.image_shape, self.classes = (channels or 0, image_size or 0, image_size or 0), classes or 0

    @override
    def dataset(self, split: Split) -> Dataset[Any]:
        size = self.samples if split == "train" else max(64, self.samples // 100)
        seed = f"{self.seed}/{split}"
        if self.tokens_per_sample:
            return RandomTokens(size, context=self.context, vocab_size=self.vocab_size, seed=hash_of(seed))
        return RandomImages(size, shape=self.image_shape, classes=self.classes, seed=hash_of(seed))


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode(), "big") % (2**61 - 1)


class RandomTokens(Dataset[Batch]):
    def __init__(self, size: int, *, context: int, vocab_size: int, seed: int) -> None:
        self.size, self.context, self.vocab_size, self.seed = size, context, vocab_size, seed

    def __len__(self) -> int:
        return self.size

    @override
    def __getitem__(self, index: int) -> Batch:
        draw = torch.Generator().manual_seed((self.seed + index) % 2**63)
        tokens = torch.randint(self.vocab_size, (self.context + 1,), generator=draw)
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


class RandomImages(Dataset[Batch]):
    def __init__(self, size: int, *, shape: tuple[int, ...], classes: int, seed: int) -> None:
        self.size, self.shape, self.classes, self.seed = size, shape, classes, seed

    def __len__(self) -> int:
        return self.size

    @override
    def __getitem__(self, index: int) -> Batch:
        draw = torch.Generator().manual_seed((self.seed + index) % 2**63)
        target: Tensor = torch.randint(self.classes, (), generator=draw)
        return {"inputs": torch.rand(self.shape, generator=draw), "targets": target}
