"""Whether all ranks hold the same data: they divide one order of samples."""

import logging
from typing import Any

import numpy as np
from torch.utils.data import Subset

from armature.data.draw import ReadLoader
from armature.data.samples import Samples, collated, digest
from armature.data.stream import Stream
from armature.errors import ConfigError

log = logging.getLogger(__name__)


def check(read: ReadLoader, strategy: Any, *, owner: str, split: str, seed: int) -> None:
    """Raise ConfigError, on all ranks, if their data are not the same.

    Lengths and indices are compared; then the first, middle and last sample, in a resumed run as
    well: one process may have begun it. Samples that this rank reads twice as the same ones must be
    those of rank 0. Others are augmented by a generator of the dataset's own, which may differ.
    """
    size, rank = len(read.dataset), strategy.global_rank
    own = digest([size, None if read.draw is None else read.draw(0), *_subsets(read.dataset)])
    same = own == strategy.broadcast(own)
    first = _few(read.dataset, seed=seed)
    theirs = strategy.broadcast(first)
    if same and None not in (first, theirs) and first != theirs:
        same = first != _few(read.dataset, seed=seed)
    if not strategy.reduce_boolean_decision(same):
        raise ConfigError(
            f"data: {owner} has other {split} data on "
            f"{'another rank' if same else f'rank {rank}'} than on rank 0 ({size} samples on rank "
            f"{rank}). They are divided over the ranks by index, so some would be used twice and "
            "some not at all. Let every rank have all samples, in the same order: read no rank in "
            "the dataset, shuffle with a seed (np.random.default_rng(0)), and sort names of files "
            "and what comes from a set (sorted(set(names)))."
        )


def _subsets(dataset: Any) -> list[Any]:
    found = []
    while isinstance(dataset, Subset):
        found.append(np.asarray(dataset.indices))
        dataset = dataset.dataset
    return found


def _few(dataset: Any, *, seed: int) -> str | None:
    """Return a digest of the first, middle and last sample; of a stream, of the first three."""
    size = len(dataset)
    places = range(min(3, size)) if isinstance(dataset, Stream) else {0, size // 2, size - 1}
    samples = Samples(
        dataset, size=max(1, size), seed=seed, training=False, collate_fn=collated,
        foreign=True,
    )  # fmt: skip
    try:
        return digest(samples.__getitems__(sorted(places)) if size else [])
    except Exception as error:  # it may wait for what training starts
        log.debug("samples cannot be read before training: %s", error)
        return None
