"""Turns a sampler's keys into finished batches. Runs in the loader's processes, or in the training process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info
from typing_extensions import override

from armature.data.sampler import PADDING
from armature.data.stream import Reader, Stream
from armature.errors import ConfigError
from armature.models.loss import IGNORED

Batch = dict[str, Tensor]
_SPARE = np.random.MT19937(0)  # NumPy's global generator while the training process makes samples


class Samples(Dataset[Batch]):
    """Decodes the epoch from the keys, augments, collates, and masks padding.

    A sample's random numbers depend on (seed, epoch, index) alone, whether they come from the generator that `augment`
    gets, or from the global generators of Python, NumPy and torch, which are seeded for each sample. So they are the
    same under any number of ranks and workers, and after any resume. Only in training are samples augmented, and a
    stream's blocks shuffled.

    Args:
        size: samples that a key's index may name.
        collate_fn: makes a batch of a list of samples; None: torch's default_collate.
        foreign: the dataset was not written for this project: its `batch` and `augment` mean something else.
    """

    def __init__(
        self, dataset: Any, *, size: int, seed: int, training: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None, foreign: bool = False,
    ) -> None:  # fmt: skip
        self.dataset, self.size, self.training = dataset, size, training
        self.collate_fn = None if collate_fn is default_collate else collate_fn
        self.seed = f"{seed}" if training else f"{seed}/evaluation"
        augment = getattr(dataset, "augment", None) if training and not foreign else None
        self.augment = augment if callable(augment) else None
        self.describe = None if foreign else getattr(dataset, "describe", None)
        self.batch = None if foreign or self.augment or self.collate_fn else getattr(dataset, "batch", None)
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
        if self.batch is not None:
            if get_worker_info() is not None:
                seed_generators(self._seed_of(filled[0]))
            batch = self.batch([key % self.size for key in filled])
        else:
            with preserved_generators():
                generator = torch.Generator()
                batch = self._collate([self._sample(key, generator) for key in filled], key=filled[0])
        if PADDING in keys:
            if not isinstance(batch, dict) or not isinstance(batch.get("targets"), Tensor):
                raise ConfigError(
                    f"{_name(self.dataset)} has {self.size} held-out samples, too few to give each rank one in every "
                    'batch, and only a batch with "targets" can be filled up with samples that do not count. Type '
                    "another data.eval_batch_size (not 1), or evaluate on fewer ranks."
                )
            batch["targets"][torch.tensor(keys) == PADDING] = IGNORED
        return batch

    def _collate(self, samples: list[Any], *, key: int) -> Any:
        if self.collate_fn is not None:
            seed_generators(
                self._seed_of(key) ^ 1
            )  # mixup and the like, in a collate_fn, draw other numbers than samples
            return self.collate_fn(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, ValueError) as error:
            what = str(error).splitlines()[0]
            raise ConfigError(
                f"The samples of {_name(self.dataset)} cannot be stacked into a batch ({what}). Give the data module a "
                "method collate_fn(self, samples) that returns a batch of a list of samples, for example padded "
                "(docs/data.md)."
            ) from error

    def _sample(self, key: int, generator: torch.Generator) -> Any:
        seed = self._seed_of(key)
        source = key % self.size if self.reader is None else self.reader.record(*divmod(key, self.size))
        seed_generators(seed)
        sample = self.dataset[source] if self.reader is None else self.dataset.sample(source)
        return sample if self.augment is None else self.augment(sample, generator.manual_seed(seed))

    def _seed_of(self, key: int) -> int:
        return seed_of(self.seed, *divmod(key, self.size))


def seed_of(seed: str, *place: int) -> int:
    """Return 63 bits that depend on all arguments."""
    text = "/".join([seed, *map(str, place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _name(dataset: Any) -> str:
    return type(getattr(dataset, "dataset", dataset)).__name__


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch's CPU, Python and NumPy."""
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which is slow and seeds the GPU's generators too
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def seeded(text: str) -> Iterator[None]:
    """Seed the global generators with a hash of `text` in this block, and restore them after it."""
    with preserved_generators():
        seed_generators(seed_of(text))
        yield


@contextmanager
def preserved_generators() -> Iterator[None]:
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
