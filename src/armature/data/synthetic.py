"""Made-up samples of the model's sizes: for simulations, and to try a model's speed without
data.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data.base import Batch, DataModule, Split
from armature.data.samples import seed_of
from armature.errors import ConfigError


class Vocabulary:
    """The number of different tokens."""

    def __init__(self, *, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def prepare(self) -> None:
        """There is nothing to prepare."""


class SyntheticData(DataModule):
    """Random tokens, or random images with random classes.

    Every sample depends on the seed and its index alone.

    Args:
        source: how many different tokens there are.
        context: tokens per sample, unless image_size is given.
        image_size, channels, classes: of images (channels, image_size, image_size).
        samples: in the train split; val and test have a 500th of it, and at least one batch of
            64.
    """

    def __init__(
        self,
        *,
        source: Vocabulary,
        context: int,
        image_size: int | None = None,
        channels: int | None = None,
        classes: int | None = None,
        samples: int = 1_000_000,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.seed = seed
        images = (image_size, channels, classes)
        if any(images) and not all(images):
            raise ConfigError(
                f"data.image_size={image_size}, data.channels={channels}, data.classes={classes}: "
                "data=synthetic makes images if it has all three sizes, and tokens if it has none. "
                "Type all, or null for each."
            )
        self.samples = samples
        if image_size and channels and classes:
            self.draw = partial(
                draw_image, shape=(channels, image_size, image_size), classes=classes
            )
        else:
            self.tokens_per_sample = context
            self.draw = partial(draw_tokens, context=context, vocab_size=source.vocab_size)

    @override
    def dataset(self, split: Split) -> Dataset[Batch]:
        size = self.samples if split == "train" else max(64, self.samples // 500)
        return RandomSamples(size, seed=f"{self.seed}/{split}", draw=self.draw)


class RandomSamples(Dataset[Batch]):
    """What a function draws with a generator for each sample."""

    def __init__(self, size: int, *, seed: str, draw: Callable[[torch.Generator], Batch]) -> None:
        self.size, self.seed, self.draw = size, seed, draw

    def __len__(self) -> int:
        return self.size

    @override
    def __getitem__(self, index: int) -> Batch:
        return self.draw(torch.Generator().manual_seed(seed_of(self.seed, index)))


def draw_tokens(generator: torch.Generator, *, context: int, vocab_size: int) -> Batch:
    tokens = torch.randint(vocab_size, (context + 1,), generator=generator)
    return {"inputs": tokens[:-1], "targets": tokens[1:]}


def draw_image(generator: torch.Generator, *, shape: tuple[int, int, int], classes: int) -> Batch:
    target = torch.randint(classes, (), generator=generator)
    return {"inputs": torch.rand(shape, generator=generator), "targets": target}
