"""Turns a sampler's keys into finished batches.

Runs in the loader's processes, or in the training process.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from armature.data.sampler import PADDING
from armature.data.stream import Reader, Stream
from armature.data.worker_signals import heed_the_rank_alone
from armature.errors import ConfigError, end_of_data
from armature.models.loss import IGNORED

Batch = dict[str, Tensor]
_SPARE = np.random.MT19937(0)  # NumPy's global generator while the training process makes samples


class Batched(Dataset[Batch]):
    """A dataset that makes whole batches in `batch`."""

    def batch(self, indices: list[int]) -> Batch:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Batch:
        # range: -1 is the last sample, and an index behind it ends iteration by IndexError
        return {name: value[0] for name, value in self.batch([range(len(self))[index]]).items()}  # pyright: ignore[reportArgumentType]


class Samples(Dataset[Batch]):
    """Decodes the epoch from the keys, augments, collates, and masks padding.

    A sample's random numbers depend on (seed, epoch, index) alone, whether they come from the
    generator that `augment` gets, or from the global generators of Python, NumPy and torch, which
    are seeded for each sample. So they are the same under any number of ranks and workers, and
    after any resume. Only in training are samples augmented.

    Args:
        size: samples that a key's index may name.
        collate_fn: makes a batch of a list of samples; None: torch's default_collate.
        foreign: the dataset was not written for this project: its `batch` and `augment` mean
            something else.
    """

    def __init__(
        self, dataset: Any, *, size: int, seed: int, training: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None, foreign: bool = False,
    ) -> None:  # fmt: skip
        self.seed, self._source, self._size, self._foreign = seed, dataset, size, foreign
        self._collate_fn = None if collate_fn is default_collate else collate_fn
        self._seed = f"{seed}" if training else f"{seed}/evaluation"
        augment = getattr(dataset, "augment", None) if training and not foreign else None
        self._augment = augment if callable(augment) else None
        self.describe = None if foreign else getattr(dataset, "describe", None)
        whole = not (foreign or self._augment or self._collate_fn)
        self._batch = getattr(dataset, "batch", None) if whole else None
        self._reader = Reader(dataset, size=size) if isinstance(dataset, Stream) else None

    @property
    def of_user(self) -> Any:
        """The dataset as its author knows it."""
        within = getattr(self._source, "dataset", None) if self._reader is not None else None
        return within if isinstance(within, IterableDataset) else self._source

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, keys: list[int]) -> Batch:
        last = max(0, *keys)  # fills padding: for another key, a stream would have to be read again
        filled = [last if key == PADDING else key for key in keys]
        try:
            if self._batch is not None:
                if get_worker_info() is not None:
                    seed_generators(self._seed_of(filled[0]))
                batch = self._batch([key % self._size for key in filled])
            else:
                with preserved_generators():
                    generator = torch.Generator()
                    batch = self._collate(
                        [self._sample(key, generator) for key in filled], key=filled[0]
                    )
        except StopIteration as error:
            raise end_of_data(f"{type(self.of_user).__name__} or its collate_fn") from error
        if PADDING in keys:
            assert has_targets(batch), "the feed has asked"
            batch["targets"][torch.tensor(keys) == PADDING] = IGNORED
        return batch

    def _collate(self, samples: list[Any], *, key: int) -> Any:
        if self._collate_fn is not None:
            # mixup and the like, in a collate_fn, draw other numbers than samples
            seed_generators(self._seed_of(key) ^ 1)
            return self._collate_fn(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError, ValueError) as error:
            what = str(error).splitlines()[0]
            remedy = "Give the data module a method collate_fn(self, samples) that"
            if self._foreign:
                remedy = "Pass DataLoader(collate_fn=…) a function of the list of samples that"
            raise ConfigError(
                f"The samples of {type(self.of_user).__name__} cannot be stacked into a batch "
                f"({what}). {remedy} returns a batch, for example padded (docs/data.md)."
            ) from error

    def _sample(self, key: int, generator: torch.Generator) -> Any:
        seed, place = self._seed_of(key), divmod(key, self._size)
        record = self._reader.record(*place) if self._reader is not None else None
        seed_generators(seed)
        streamed = self._reader is not None
        sample = self._source.sample(record) if streamed else self._source[place[1]]
        if self._augment is None:
            return sample
        return self._augment(sample, generator.manual_seed(seed))

    def _seed_of(self, key: int) -> int:
        return seed_of(self._seed, *divmod(key, self._size))


class BeginWorker:
    """A worker_init_fn: lets `get_worker_info().dataset` be the user's dataset, then calls the
    user's own, if any.

    Before that it leaves signals that end a run to the rank.
    """

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        heed_the_rank_alone()
        # frozen, but each worker has its own
        object.__setattr__(info, "dataset", info.dataset.of_user)  # pyright: ignore[reportAttributeAccessIssue]
        if self.function is not None:
            self.function(worker)


def collated(batch: Any) -> Any:
    """A loader's collate_fn: `Samples` has collated the batch."""
    return batch


def seed_of(seed: str, *place: int) -> int:
    """Return 63 bits that depend on all arguments."""
    text = "/".join([seed, *map(str, place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def digest(value: Any) -> str:
    """Return a hash of the numbers and texts in a value."""
    checksum = hashlib.sha256()
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().float().cpu().numpy() if leaf.layout == torch.strided else None
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            checksum.update(np.ascontiguousarray(leaf).data)
        elif isinstance(leaf, int | float | str | np.generic):
            checksum.update(repr(leaf).encode())
    return checksum.hexdigest()


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def has_targets(batch: Any) -> bool:
    """Return whether a batch can be filled up with samples that do not count."""
    return isinstance(batch, dict) and isinstance(batch.get("targets"), Tensor)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch's CPU, Python and NumPy."""
    # not torch.manual_seed, which is slow and seeds the GPU's generators too
    torch.default_generator.manual_seed(seed)
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
    """Restore the training process's global generators: the model's draws must not depend on who
    loads the data.
    """
    if get_worker_info() is not None:
        yield
        return
    global_numpy: Any = np.random
    python, pytorch = random.getstate(), torch.get_rng_state()
    numpy = global_numpy.get_bit_generator()
    # swapped, since NumPy takes ten times as long to copy its state
    global_numpy.set_bit_generator(_SPARE)
    try:
        yield
    finally:
        random.setstate(python)
        global_numpy.set_bit_generator(numpy)
        torch.set_rng_state(pytorch)
