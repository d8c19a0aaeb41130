"""Assigns samples to ranks and micro-batches: their order is a function of (seed, epoch, position)
alone.

Training reads one endless stream. Position p belongs to epoch p // N at place p % N of that epoch's
permutation, and optimizer step k holds the positions [kG, (k + 1)G). A step may straddle two
epochs: no sample is dropped or repeated.

N: samples per epoch, G: global batch, R: data ranks, m: micro-batch.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

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
        epoch: returns the epoch to serve, for a caller that counts epochs itself; None: the one of
            `position`.
        shuffled: False for a stream, whose samples come in the order in which they are read.
        population: samples that an epoch's order is made of; None: the N that it has.
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
        epoch: Callable[[], int] | None = None,
        shuffled: bool = True,
        population: int | None = None,
        left_out: Callable[[], Iterable[tuple[int, int]]] = tuple,
    ) -> None:
        self.size, self.seed, self.batches, self.rank, self.shuffled = (
            size,
            seed,
            batches,
            rank,
            shuffled,
        )
        self.population = size if population is None else population
        self.batch_size = batches.micro_batch_size  # DeepSpeed asks the sampler for it
        self._position = position
        self._epoch = epoch or (lambda: position() // size)
        self._left_out = left_out

    def __len__(self) -> int:
        """Return the micro-batches of the *whole* epoch, also after a resume in its middle, where
        Lightning counts on.

        An epoch consists of the steps whose first position lies in it.
        """
        end, step = (self._epoch() + 1) * self.size, self.batches.global_batch_size
        return max(0, -(-(end - self.first_position()) // step)) * self.batches.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        position, end = self._position(), (self._epoch() + 1) * self.size
        step, micro = self.batches.global_batch_size, self.batches.micro_batch_size
        # the step that straddles two epochs alone: the next order is drawn as late as possible
        while position < end:
            steps = max(1, min((end - position) // step, _BLOCK_SAMPLES // step))
            positions = position + np.arange(steps)[:, None, None] * step + self._share()
            yield from self._keys(self.places_of(positions.reshape(-1, micro))).tolist()
            position += steps * step

    def _share(self) -> NDArray[np.int64]:
        """Return this rank's offsets in a step: (accumulate, micro)."""
        micro = self.batches.micro_batch_size
        starts = (
            np.arange(self.batches.accumulate) * (micro * self.batches.data_ranks)
            + self.rank * micro
        )
        return starts[:, None] + np.arange(micro)

    def epoch_keys(self) -> Iterator[list[int]]:
        """Yield the keys of all samples of the epoch, in global batches."""
        start, step = self._epoch() * self.size, self.batches.global_batch_size
        for place in range(0, self.size, step):
            positions = start + np.arange(place, min(place + step, self.size))
            yield self._keys(self.places_of(positions)).tolist()

    def first_position(self) -> int:
        """Return the position of the epoch's first step."""
        start = self._epoch() * self.size
        return start + (self._position() - start) % self.batches.global_batch_size

    def step_keys(self, position: int) -> list[list[int]]:
        """Return this rank's keys of the step that starts at a position, one list per
        micro-batch.
        """
        return self._keys(self.places_of(position + self._share())).tolist()

    def places_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where samples are in the order with nothing left out, by their positions in the
        stream.
        """
        for start, length in sorted(self._left_out()):
            positions = positions + length * (positions >= start)
        return positions

    def _keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions // self.size * self.population + self._indices(positions)

    def _indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(positions, self.size)
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = self._order(places[here], epoch=epoch)
        return indices

    def _order(self, places: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        """Return the indices of the samples at places of an epoch."""
        return (
            permuted(places, size=self.population, seed=self.seed, epoch=epoch)
            if self.shuffled
            else places
        )


class DrawnSampler(TrainSampler):
    """TrainSampler for an order that another sampler draws, once per epoch, perhaps with
    repetitions.

    The key is (epoch × N + place) × population + index, so a sample that is drawn twice is
    augmented twice.

    Args:
        draw: returns the N indices of an epoch: the same on each rank.
        population: samples of the dataset, which the indices lie below.
    """

    def __init__(
        self, size: int, *, draw: Callable[[int], NDArray[np.int64]], population: int, **kwargs: Any
    ) -> None:
        super().__init__(size, population=population, **kwargs)
        self.draw = draw
        self._drawn: dict[int, NDArray[np.int64]] = {}

    @override
    def _keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions * self.population + self._indices(positions)

    @override
    def _order(self, places: NDArray[np.int64], *, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._drawn:
            for old in self._drawn.keys() - {epoch - 1}:
                del self._drawn[old]
            self._drawn[epoch] = self.draw(epoch)
        return self._drawn[epoch][places]


class EpochSampler:
    """Yields the whole epoch for code outside of the training loop: the samples of all ranks, each
    once.

    In global batches, as the user's own loader: a schedule that is made from its length must not
    depend on the micro-batch.

    Args:
        sampler: returns the sampler of any rank.
    """

    def __init__(self, sampler: Callable[[], TrainSampler]) -> None:
        self._sampler = sampler

    @property
    def population(self) -> int:
        return self._sampler().population

    @property
    def batch_size(self) -> int:
        return self._sampler().batches.global_batch_size

    def __len__(self) -> int:
        return -(-self._sampler().size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return self._sampler().epoch_keys()


class EvalSampler:
    """Yields one data rank's batches of an evaluation.

    Over all ranks, each sample comes once, in order.

    All ranks get the same number of batches. If samples do not fill the last batches, all ranks
    share them, so that each has at least one sample. Only if there are too few samples for that, a
    rank's batch is `[PADDING]`. No batch mixes samples and padding, since not every loss can ignore
    a part of a batch.

    Args:
        pads: False: a rank has no batch in place of one of padding, as no other rank waits for it.
    """

    def __init__(
        self, size: int, *, batch_size: int, rank: int, ranks: int, pads: bool = True
    ) -> None:
        self.size, self.batch_size, self.rank, self.ranks, self.pads = (
            size,
            batch_size,
            rank,
            ranks,
            pads,
        )
        self.population = size

    @property
    def has_padding(self) -> bool:
        """Whether the last batch of some rank is `[PADDING]`."""
        rest = self.size % self.ranks if self.batch_size == 1 else self.size
        return self.pads and 0 < rest < self.ranks

    def __len__(self) -> int:
        batches = -(-self.size // (self.batch_size * self.ranks))
        if self.pads or not batches or (batches > 1 and self.batch_size > 1):
            return batches
        last = self.size - (batches - 1) * self.batch_size * self.ranks
        return batches - (last * self.rank // self.ranks == last * (self.rank + 1) // self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        full, end = self.batch_size * self.ranks, 0
        for left in range(len(self), 0, -1):
            start, rest = end, self.size - end
            # or the last would be too small
            even = left == 2 and rest - full < self.ranks and self.batch_size > 1
            end = start + (rest // 2 if even else min(full, rest))
            lower, upper = (
                start + (end - start) * r // self.ranks for r in (self.rank, self.rank + 1)
            )
            if self.pads or upper > lower:
                yield list(range(lower, upper)) or [PADDING]


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
