"""Assigns samples to ranks and micro-batches: their order is a function of (seed, epoch, position)
alone.

Training reads one endless stream. Position p belongs to epoch p // N at place p % N of that epoch's
permutation, and optimizer step k holds the positions [kG, (k + 1)G). A step may straddle two
epochs: no sample is dropped or repeated.

N: samples per epoch, G: global batch, R: data ranks, m: micro-batch.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.data.batching import Batches

PADDING = -1  # index of a sample that only fills an evaluation batch
_ROUNDS = 8
_BLOCK_SAMPLES = 4096  # permuted in one call: the permutation then costs nanoseconds per sample


class TrainSampler:
    """Yields one data rank's micro-batches of one epoch, as lists of keys: epoch × population +
    index.

    The key carries the epoch, so that random augmentation can depend on (seed, epoch, index) and
    nothing else. Data rank r of R takes, in micro-batch j of a step that starts at p, the positions
    p + j·mR + r·m + [0, m).

    Args:
        position: returns the position in the stream, in samples. Called at each `iter`: a resume
            may set it late.
        epoch: returns the epoch to serve.
        shuffled: False for a stream, whose samples come in the order in which they are read.
        draw: returns the N indices of an epoch, perhaps with repetitions, the same on each rank:
            another order. Then the key is position × population + index, so that a sample that is
            drawn twice is augmented twice.
        population: samples that an epoch's order is made of: the N that it has, or more.
        left_out: returns the parts (start, length) of the order that are left out: what comes after
            them moves up.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        batches: Batches,
        rank: int,
        position: Callable[[], int],
        epoch: Callable[[], int],
        population: int,
        shuffled: bool = True,
        draw: Callable[[int], NDArray[np.int64]] | None = None,
        left_out: Callable[[], Iterable[tuple[int, int]]] = tuple,
    ) -> None:
        self.size, self.seed, self.batches, self.rank = size, seed, batches, rank
        self.shuffled, self.draw, self.population = shuffled, draw, population
        self.batch_size = batches.micro_batch_size  # DeepSpeed asks the sampler for it
        self._position, self._epoch, self._left_out = position, epoch, left_out
        self._drawn: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Return the micro-batches of the *whole* epoch, also after a resume in its middle, where
        Lightning counts on.

        An epoch consists of the steps whose first position lies in it.
        """
        end, step = (self._epoch() + 1) * self.size, self.batches.global_batch_size
        return max(0, -(-(end - self.first_position()) // step)) * self.batches.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        position, end = self._position(), (self._epoch() + 1) * self.size
        step = self.batches.global_batch_size
        # the step that straddles two epochs alone: the next order is drawn as late as possible
        while position < end:
            steps = max(1, min((end - position) // step, _BLOCK_SAMPLES // step))
            yield from self.step_keys(position + np.arange(steps)[:, None, None] * step)
            position += steps * step

    def step_keys(self, positions: Any) -> list[list[int]]:
        """Return this rank's keys of the steps that start at positions, one list per
        micro-batch.
        """
        micro, ranks = self.batches.micro_batch_size, self.batches.data_ranks
        starts = (np.arange(self.batches.accumulate) * ranks + self.rank) * micro
        share = starts[:, None] + np.arange(micro)
        return self._keys((positions + share).reshape(-1, micro)).tolist()

    def epoch_keys(self) -> Iterator[list[int]]:
        """Yield the keys of all samples of the epoch, in global batches."""
        start, step = self._epoch() * self.size, self.batches.global_batch_size
        for place in range(0, self.size, step):
            yield self._keys(start + np.arange(place, min(place + step, self.size))).tolist()

    def first_position(self) -> int:
        """Return the position of the epoch's first step."""
        start = self._epoch() * self.size
        return start + (self._position() - start) % self.batches.global_batch_size

    def _keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        for start, length in sorted(self._left_out()):
            positions = positions + length * (positions >= start)
        epochs, places = np.divmod(positions, self.size)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = self._order(places[here], epoch=epoch)
        return (epochs if self.draw is None else positions) * self.population + indices

    def _order(self, places: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Return the indices of the samples at places of an epoch."""
        if self.draw is not None:
            if epoch not in self._drawn:
                kept = {e: drawn for e, drawn in self._drawn.items() if e == epoch - 1}
                self._drawn = {**kept, epoch: self.draw(epoch)}
            return self._drawn[epoch][places]
        if not self.shuffled:
            return places
        return permuted(places, size=self.population, seed=self.seed, epoch=epoch)


class EpochSampler:
    """Yields the whole epoch for code outside of the training loop: the samples of all ranks, each
    once.

    In global batches, as the user's own loader: a schedule that is made from its length must not
    depend on the micro-batch.
    """

    def __init__(self, sampler: TrainSampler) -> None:
        self._sampler, self.population = sampler, sampler.population
        self.batch_size = sampler.batches.global_batch_size

    def __len__(self) -> int:
        return -(-self._sampler.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return self._sampler.epoch_keys()


class EvalSampler:
    """Yields one data rank's batches of an evaluation.

    Over all ranks, each sample comes once, in order.

    All ranks get the same number of batches. If samples do not fill the last batches, all ranks
    share them, so that each has at least one sample. Only if there are too few samples for that, a
    rank's batch is `[PADDING]`. No batch mixes samples and padding, since not every loss can ignore
    a part of a batch.

    Args:
        pads: False: a rank has no batch in place of one of padding, as no other rank waits for it.

    Attributes:
        has_padding: whether the last batch of some rank is `[PADDING]`.
    """

    def __init__(
        self, size: int, *, batch_size: int, rank: int, ranks: int, pads: bool = True
    ) -> None:
        self.size, self.batch_size, self.ranks, self.population = size, batch_size, ranks, size
        # where the batches of all ranks begin that are read at once, and the end
        bounds = [*range(0, size, batch_size * ranks), size]
        if len(bounds) > 2 and size - bounds[-2] < ranks and batch_size > 1:
            bounds[-2] = (bounds[-3] + size) // 2  # or the last would be too small
        self.has_padding = pads and 0 < bounds[-1] - bounds[-2:][0] < ranks
        shares = [
            range(
                start + (end - start) * rank // ranks, start + (end - start) * (rank + 1) // ranks
            )
            for start, end in pairwise(bounds)
        ]
        self._shares = shares if pads else [*filter(None, shares)]

    def __len__(self) -> int:
        return len(self._shares)

    def __iter__(self) -> Iterator[list[int]]:
        return ([*share] or [PADDING] for share in self._shares)


def permuted(
    places: NDArray[np.int64], *, size: int, seed: int | str, epoch: int
) -> NDArray[np.int64]:
    """Return the elements at `places` of the permutation of [0, size) that belongs to (seed,
    epoch).

    A Feistel network over the next power of two, walked until it falls below `size` (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"). It needs no table, so an epoch of any
    size costs no memory. It is defined here, so it does not change with numpy's version.
    """
    keys = np.frombuffer(
        hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8"
    )
    bits = max(1, (size - 1).bit_length())
    values = _feistel(places.astype(np.uint64), keys=keys, bits=bits)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], keys=keys, bits=bits)
    return values.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], *, keys: NDArray[np.uint64], bits: int
) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits - bits // 2)
    low_mask, high_mask = np.uint64((1 << int(low_bits)) - 1), np.uint64((1 << bits // 2) - 1)
    low, high = values & low_mask, values >> low_bits
    for i, key in enumerate(keys):
        if i % 2:
            high = high ^ (_mixed(low ^ key) & high_mask)
        else:
            low = low ^ (_mixed(high ^ key) & low_mask)
    return (high << low_bits) | low


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea and Flood 2014): each bit of the result depends on each
    bit of the input.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
