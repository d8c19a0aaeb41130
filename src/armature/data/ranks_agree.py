"""Whether all ranks hold the same data: they divide one order of samples."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from armature.data import alike, eval_loader, iterable
from armature.data.loaders import ReadLoader
from armature.data.samples import BeginWorker, Samples, preserved_generators
from armature.errors import ConfigError

log = logging.getLogger(__name__)

SPREAD = 16  # samples that are compared if the first few differ
READINGS = 64  # of each of them
READING_SECONDS = 10.0  # after which two readings are enough


def check(
    reads: Sequence[tuple[str, ReadLoader]],
    *,
    strategy: Any,
    rank: int,
    owner: str,
    split: str,
    size: int,
    seed: int,
    num_workers: int | None,
    fresh: bool,
) -> None:
    """Raise ConfigError, on all ranks, if their data are not the same.

    Called by all ranks together.

    Three samples are read. If they differ, it may be by chance, as under augmentation by a
    generator of the dataset's
    own. So more samples are read, many times: they are the ranks' own if they repeat, and at least
    half of them differ.

    Args:
        reads: the loaders of a split, with their names.
        owner: the data module's class.
        size: samples of this rank.
        num_workers: of all loaders; None: as each has.
        fresh: the run begins. In a resumed one, datasets that count how often they are read would
            be disturbed.
    """
    kind = {"train": "training", "val": "validation"}.get(split, split)
    end = " Without a test at the end: trainer.test_at_end=false." if split == "test" else ""

    def each(reading: Callable[..., Any]) -> list[Any] | None:
        """Return what is read from each loader, or None if one cannot be read."""
        waits = threading.Timer(
            eval_loader.WAIT_SECONDS, log.warning, (
                "data: %s has not read its first %s samples after %g s. Each rank reads some "
                "before training, to "
                "compare them. If they wait for what training starts, start that in setup(stage), "
                "or type "
                "data.num_workers=1: what a loader process does not return in this time is not "
                "compared.",
                owner, kind, eval_loader.WAIT_SECONDS,
            ),
        )  # fmt: skip
        waits.daemon = True
        waits.start()
        try:
            return [
                reading(
                    read,
                    seed=seed,
                    num_workers=read.options["num_workers"] if num_workers is None else num_workers,
                    fresh=fresh,
                )
                for _, read in reads
            ]
        except Exception as error:
            log.debug("the samples of %s cannot be read before training: %s", owner, error)
            return None
        finally:
            waits.cancel()

    described = [(name, len(read.dataset), read.describe()) for name, read in reads]
    own = hashlib.sha256(repr((size, described)).encode()).hexdigest()
    same = own == strategy.broadcast(own)
    if not strategy.reduce_boolean_decision(same):
        raise ConfigError(
            f"data: {owner} has other {kind} data on {_where(same, rank)} than on rank 0 ({size} "
            "samples on rank "
            f"{rank}). Let every rank have all samples, in the same order: they are divided over "
            "the ranks later, and "
            f"draw from no generator of its own in them.{end}"
        )
    samples = each(_first)
    first = strategy.broadcast(samples)
    same = samples is None or first is None or all(map(_near, samples, first))
    if strategy.reduce_boolean_decision(same):
        return
    again = None if samples is None else each(_first)
    repeats = samples is not None and again is not None and all(map(_near, samples, again))
    several = each(_repeated) if repeats else None
    first = strategy.broadcast(several)
    same = several is None or first is None or not any(map(_differ, several, first))
    if not strategy.reduce_boolean_decision(same):
        raise ConfigError(
            f"data: {owner} has other {kind} samples on {_where(same, rank)} than on rank 0 under "
            "the same indices "
            f"({size} samples on rank {rank}). They are divided over the ranks by index, so some "
            "would be used twice "
            "and some not at all. Let the dataset be the same on each rank: do not read the rank "
            "in it, shuffle with a "
            "seed (np.random.default_rng(0)), and sort names of files and what comes from a set "
            f"(sorted(set(names))).{end}"
        )


def _readings(
    read: ReadLoader, *, samples: int, times: int, seed: int, num_workers: int, fresh: bool
) -> Iterable[list[Any]]:
    """Return sketches of so many samples (data/alike.py), with the same random numbers each time.

    All are read in one process, where a generator that a dataset keeps draws on.
    """
    dataset = read.dataset
    if isinstance(dataset, iterable.IterableStream):
        return (_sketches(dataset.first_records(samples)) for _ in range(times))
    if not fresh or not (size := len(dataset)):
        return ()
    spread = np.ceil(np.linspace(0, size - 1, min(samples, size))).astype(int).tolist()
    return eval_loader.read_batches(
        Samples(dataset, size=size, seed=seed, training=False, collate_fn=_sketches, foreign=True),
        [spread] * times,
        num_workers=num_workers,
        worker_init_fn=BeginWorker(read.options["worker_init_fn"]),
        multiprocessing_context=read.options["multiprocessing_context"],
    )


def _first(read: ReadLoader, **options: Any) -> list[Any]:
    """Return sketches of the first, middle and last sample; of a stream, of the first ones."""
    with preserved_generators():
        return next(iter(_readings(read, samples=iterable.FIRST, times=1, **options)), [])


def _repeated(read: ReadLoader, **options: Any) -> list[Any] | None:
    """Return sketches of more samples if they are the same in many readings, else None."""
    began, first = time.monotonic(), None
    with preserved_generators():
        for reading in _readings(read, samples=SPREAD, times=READINGS, **options):
            if first is None:
                first = reading
                continue
            if not _near(first, reading):
                return None
            if time.monotonic() - began > READING_SECONDS:
                break
    return first


def _sketches(samples: list[Any]) -> list[Any]:
    return [alike.sketch(sample) for sample in samples]


def _near(samples: list[Any], others: list[Any]) -> bool:
    return len(samples) == len(others) and all(map(alike.near, samples, others))


def _differ(own: list[Any] | None, first: list[Any] | None) -> bool:
    """Return whether at least half of the samples differ: by rare augmentation, only few of them
    do.
    """
    if not own or not first:
        return False
    return len(own) != len(first) or 2 * sum(
        not alike.near(*pair) for pair in zip(own, first, strict=True)
    ) >= len(own)


def _where(same: bool, rank: int) -> str:
    return "another rank" if same else f"rank {rank}"
