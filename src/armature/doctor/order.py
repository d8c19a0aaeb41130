"""The order of the samples: data ranks are disjoint and together cover the epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from armature.data.feed import Feed
from armature.data.sampler import DrawnSampler
from armature.doctor.finding import Finding, failure, ok

GROUP = "data"
MOST_SAMPLES = 1_000_000  # of an epoch that is drawn whole


def check(data: Feed, *, ranks: int) -> Iterator[Finding]:
    """Draw the first epoch of each of the data ranks, and compare."""
    if data.train_size > MOST_SAMPLES:
        yield ok(GROUP, f"{data.train_size:,} samples per epoch: too many to draw them all here.")
        return
    yield from coverage(
        [_first_epoch(data, rank, ranks) for rank in range(ranks)], size=data.train_size
    )


def coverage(drawn: list[NDArray[np.int64]], *, size: int) -> Iterator[Finding]:
    """Compare what the data ranks draw in an epoch of `size` samples: numbers that identify
    samples, per rank.
    """
    owner: dict[int, int] = {}
    for rank, keys in enumerate(drawn):
        for key in keys.tolist():
            if (other := owner.setdefault(key, rank)) != rank:
                yield failure(
                    GROUP,
                    f"Data ranks {other} and {rank} both train on sample {key} in one epoch.",
                    remedy="Leave the order to armature's sampler, or use "
                    "trainer.strategy.distributed_sampler_kwargs.",
                )
                return
    count = sum(len(keys) for keys in drawn)
    if count != len(owner) or count != size:
        what = (
            f"An epoch has {size} samples, but the {len(drawn)} data ranks draw {count}, "
            f"{len(owner)} different ones."
        )
        yield failure(GROUP, what, remedy="Leave the order to armature's sampler (docs/data.md).")
    else:
        ranks = f"{len(drawn)} data ranks share" if len(drawn) > 1 else "One data rank draws"
        yield ok(GROUP, f"{ranks} the {size:,} samples of an epoch: each once.")


def _first_epoch(data: Feed, rank: int, ranks: int) -> NDArray[np.int64]:
    """Return the keys of the first epoch's samples that a data rank draws; the last step may reach
    into the next.
    """
    data.__dict__["rank_and_ranks"] = lambda: (rank, ranks)
    try:
        sampler = data.train_sampler()
        keys = np.array([key for keys in sampler for key in keys], dtype=np.int64)
    finally:
        del data.__dict__["rank_and_ranks"]
    places = sampler.size if isinstance(sampler, DrawnSampler) else 1
    return keys[keys < places * sampler.population]
