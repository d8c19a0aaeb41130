"""Whether all ranks hold the same data: they divide one order of samples."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from armature.data import alike
from armature.data.loaders import Draw, ReadLoader
from armature.errors import ConfigError

log = logging.getLogger(__name__)


def check(
    reads: Sequence[tuple[str, ReadLoader]], *, strategy: Any, rank: int, owner: str, split: str, size: int, seed: int,
    num_workers: int | None, fresh: bool,
) -> None:  # fmt: skip
    """Raise ConfigError, on all ranks, if their data are not the same. Called by all ranks together.

    Some samples are read. They are compared if they are the same when they are read again: others differ by chance.

    Args:
        reads: the loaders of a split, with their names.
        owner: the data module's class.
        size: samples of this rank.
        num_workers: of all loaders; None: as each has.
        fresh: see `ReadLoader.sketch`.
    """

    def sketches(times: int) -> list[list[Any]] | None:
        """Return what each loader's samples are compared by."""
        try:
            return [
                read.sketch(
                    seed=seed, num_workers=read.options["num_workers"] if num_workers is None else num_workers,
                    fresh=fresh, times=times,
                )
                for _, read in reads
            ]  # fmt: skip
        except Exception as error:
            log.debug("the samples of %s cannot be read before training: %s", owner, error)
            return None

    kind = {"train": "training", "val": "validation"}.get(split, split)
    end = " Without a test at the end: trainer.test_at_end=false." if split == "test" else ""
    described = [(name, len(read.dataset), read.describe()) for name, read in reads]
    own = hashlib.sha256(repr((size, described)).encode()).hexdigest()
    same = own == strategy.broadcast(own)
    if not strategy.reduce_boolean_decision(same):
        raise ConfigError(
            f"data: {owner} has other {kind} data on {_where(same, rank)} than on rank 0 ({size} samples on rank "
            f"{rank}). Let every rank have all samples, in the same order: they are divided over the ranks later, and "
            f"draw from no generator of its own in them.{end}"
        )
    samples = sketches(1)
    first = strategy.broadcast(samples)
    same = samples is None or first is None or all(map(alike.near, samples, first))
    if strategy.reduce_boolean_decision(same):
        return
    repeats = all(alike.near(each[: len(each) // 2], each[len(each) // 2 :]) for each in sketches(2) or [[None]])
    if strategy.reduce_boolean_decision(repeats):
        raise ConfigError(
            f"data: {owner} has other {kind} samples on {_where(same, rank)} than on rank 0 under the same indices "
            f"({size} samples on rank {rank}). They are divided over the ranks by index, so some would be used twice "
            "and some not at all. Let the dataset be the same on each rank: do not read the rank in it, shuffle with a "
            "seed (np.random.default_rng(0)), and sort names of files and what comes from a set "
            f"(sorted(set(names))).{end}"
        )


def check_draw(draw: Draw, epoch: int, *, strategy: Any, rank: int) -> None:
    """Raise ConfigError, on all ranks, if they have drawn other samples for an epoch. Called by all ranks together."""
    own = alike.digest(draw(epoch))
    same = own == strategy.broadcast(own)
    if not strategy.reduce_boolean_decision(same):
        raise ConfigError(
            f"{draw.owner}: {draw.name} draws other samples on {_where(same, rank)} than on rank 0 in epoch {epoch}, "
            "but they divide one draw. Give it the same weights on all ranks: compute them from what all have seen "
            "(self.all_gather(…)), or on rank 0 and send them (self.trainer.strategy.broadcast(weights))."
        )


def _where(same: bool, rank: int) -> str:
    return "another rank" if same else f"rank {rank}"
