"""Turns a sampler's keys into finished batches. Runs in the loader's processes, or in the training process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info
from typing_extensions import override

from armature.data.sampler import PADDING
from armature.data.stream import Reader, Stream
from armature.models.loss import IGNORED

Batch = dict[str, Tensor]


class Samples(Dataset[Batch]):
    """Decodes the epoch from the keys, augments, collates, and masks padding.

    A sample's random numbers depend on (seed, epoch, index) alone, whether they come from the generator that `augment`
    gets, or from the global generators of Python, NumPy and torch, which are seeded for each sample. So they are the
    same under any number of ranks and workers, and after any resume.

    Args:
        dataset: map-style, or a Stream.
        size: samples per epoch.
        seed: seed of all randomness.
        training: augment samples, and shuffle a stream's blocks.
    """

    def __init__(self, dataset: Any, *, size: int, seed: int, training: bool) -> None:
        self.dataset, self.size, self.training = dataset, size, training
        self.seed = f"{seed}" if training else f"{seed}/evaluation"
        self.augment = getattr(dataset, "augment", None) if training else None
        self.reader = None
        if isinstance(dataset, Stream):
            self.reader = Reader(dataset, size=size, seed=seed if training else None)

    def __len__(self) -> int:
        return self.size

    @override
    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, keys: list[int]) -> Batch:
        last = max(0, *keys)
        filled = [
            last if key == PADDING else key for key in keys
        ]  # the last key, since a stream would have to be read again for another
        if self.augment is None and hasattr(self.dataset, "batch"):
            if get_worker_info() is not None:
                _seed(self._seed_of(filled[0]))
            batch = self.dataset.batch([key % self.size for key in filled])
        else:
            with _preserved_generators():
                generator = torch.Generator()
                batch = cast(Batch, default_collate([self._sample(key, generator) for key in filled]))
        if PADDING in keys:
            batch["targets"][torch.tensor(keys) == PADDING] = IGNORED
        return batch

    def _sample(self, key: int, generator: torch.Generator) -> Any:
        seed = self._seed_of(key)
        if self.reader is None:
            _seed(seed)
            sample = self.dataset[key % self.size]
        else:
            record = self.reader.record(*divmod(key, self.size))
            _seed(seed)
            sample = self.dataset.sample(record)
        return sample if self.augment is None else self.augment(sample, generator.manual_seed(seed))

    def _seed_of(self, key: int) -> int:
        epoch, index = divmod(key, self.size)
        digest = hashlib.blake2b(f"{self.seed}/{epoch}/{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which is slow and seeds the GPU's generators too
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restore the training process's global generators: the model's draws must not depend on who loads the data."""
    if get_worker_info() is not None:
        yield
        return
    global_numpy: Any = np.random
    python, numpy, pytorch = random.getstate(), global_numpy.get_bit_generator(), torch.get_rng_state()
    global_numpy.set_bit_generator(
        _spare_bit_generator()
    )  # swapped, since NumPy takes ten times as long to copy its state
    try:
        yield
    finally:
        random.setstate(python)
        global_numpy.set_bit_generator(numpy)
        torch.set_rng_state(pytorch)


@cache
def _spare_bit_generator() -> np.random.BitGenerator:
    return np.random.MT19937(0)
