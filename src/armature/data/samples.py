"""Turns a sampler's keys into finished batches. Runs in the loader's processes, or in the training process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
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
_SPARE = np.random.MT19937(0)  # NumPy's global generator while the training process makes samples


class Samples(Dataset[Batch]):
    """Decodes the epoch from the keys, augments, collates, and masks padding.

    A sample's random numbers depend on (seed, epoch, index) alone, whether they come from the generator that `augment`
    gets, or from the global generators of Python, NumPy and torch, which are seeded for each sample. So they are the
    same under any number of ranks and workers, and after any resume. Only in training are samples augmented, and a
    stream's blocks shuffled.
    """

    def __init__(self, dataset: Any, *, size: int, seed: int, training: bool) -> None:
        self.dataset, self.size, self.training = dataset, size, training
        self.seed = f"{seed}" if training else f"{seed}/evaluation"
        self.augment = getattr(dataset, "augment", None) if training else None
        shuffle_seed = seed if training else None
        self.reader = Reader(dataset, size=size, seed=shuffle_seed) if isinstance(dataset, Stream) else None

    def __len__(self) -> int:
        return self.size

    @override
    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, keys: list[int]) -> Batch:
        last = max(0, *keys)  # fills padding: for another key, a stream would have to be read again
        filled = [last if key == PADDING else key for key in keys]
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
        source = key % self.size if self.reader is None else self.reader.record(*divmod(key, self.size))
        _seed(seed)
        sample = self.dataset[source] if self.reader is None else self.dataset.sample(source)
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
    global_numpy.set_bit_generator(_SPARE)  # swapped, since NumPy takes ten times as long to copy its state
    try:
        yield
    finally:
        random.setstate(python)
        global_numpy.set_bit_generator(numpy)
        torch.set_rng_state(pytorch)
