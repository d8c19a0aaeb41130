"""Reads a torch DataLoader that somebody else has made: what it loads, in which order, and how it
collates.
"""

import copy
import itertools
import logging
import operator
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from armature.data import iterable
from armature.data.samples import seed_of, seeded
from armature.errors import ConfigError

log = logging.getLogger(__name__)
SPLITS = ("train", "val", "test", "predict")


class Draw:
    """The samples of each epoch, drawn by a sampler or batch sampler from generators seeded by
    (seed, epoch).

    They may depend on more than these: on weights that change while training. So a checkpoint holds
    what the training loop has drawn of the epoch that it is in.

    Attributes:
        size: samples per epoch.
        batch_size: samples per batch, if it is a batch sampler.
        whole_batches: it is a batch sampler, so that which samples share a batch matters.
        draws_from_copies: the sampler changes as it draws.
    """

    def __init__(
        self, sampler: Any, *, owner: str, seed: int, whole_batches: bool, training: bool
    ) -> None:
        self.sampler, self.seed, self.whole_batches = sampler, seed, whole_batches
        self._training = training
        self.name, self.owner = type(sampler).__name__, owner
        if getattr(sampler, "num_replicas", 1) not in (None, 1):
            raise self._refused(
                f"divides the samples among ranks itself (num_replicas={sampler.num_replicas}). "
                "Build it with num_replicas=1 and rank=0: they are divided over the data ranks "
                "here."
            )
        self.draws_from_copies = False
        # of the epochs that the training loop has begun
        self._kept: dict[int, NDArray[np.int64]] = {}
        self.batch_size = 0
        untouched = copied(sampler)
        first, again = self._draw(0), self._draw(0)
        if not np.array_equal(first, again) and untouched is not None:  # it changes as it draws
            vars(sampler).clear()
            vars(sampler).update(vars(untouched))
            self.draws_from_copies = True
            first, again = self._draw(0), self._draw(0)
        if not np.array_equal(first, again) or (
            self.draws_from_copies and np.array_equal(self._draw(1), first)
        ):
            raise self._refused(
                "draws other samples the second time from the same seed, so a resume could not "
                "repeat them. Let it draw from torch's, NumPy's or Python's global generator or "
                "from an attribute `generator` (a torch.Generator), shuffle a copy of what it "
                "keeps, and count epochs in set_epoch(epoch) only."
            )
        self.size = first.size

    def state_dict(self, *, since: int) -> dict[int, Tensor]:
        """Return what the training loop has drawn, from an epoch on."""
        kept = {e: torch.from_numpy(drawn) for e, drawn in self._kept.items() if e >= since}
        return {e: drawn.int() if drawn.max() < 2**31 else drawn for e, drawn in kept.items()}

    def load_state_dict(self, state: dict[int, Tensor], *, population: int) -> None:
        """Keep what was drawn before the run was stopped, unless the data have changed."""
        self._kept = {
            epoch: drawn.numpy().astype(np.int64)
            for epoch, drawn in state.items()
            if len(drawn) == self.size and int(drawn.max()) < population
        }

    def __call__(self, epoch: int, *, keep: bool = False) -> NDArray[np.int64]:
        """Return the samples of an epoch: those of the training loop, once it has begun it.

        Args:
            keep: this is the training loop, which draws them once, in a resumed run before it was
                stopped.
        """
        if epoch in self._kept:
            return self._kept[epoch]
        drawn = self._draw(epoch)
        if len(drawn) != self.size:
            log.warning(
                "%s: %s yields %d samples in epoch %d, but %d in epoch 0. A resume finds its place "
                "by counting, so every epoch has as many as epoch 0: surplus ones are left out, "
                "and missing ones taken from the epoch's beginning.",
                self.owner, self.name, len(drawn), epoch, self.size,
            )  # fmt: skip
            drawn = np.resize(drawn, self.size)
        if keep:
            self._kept = {e: kept for e, kept in self._kept.items() if e >= epoch - 1}
            self._kept[epoch] = drawn
        return drawn

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        sampler = copied(self.sampler) if self.draws_from_copies else self.sampler
        with seeded(f"{self.seed}/order/{epoch}"):
            for each in (sampler, getattr(sampler, "sampler", None)):
                if each is not None and hasattr(each, "generator"):
                    seed = seed_of(f"{self.seed}/generator", epoch)
                    each.generator = torch.Generator().manual_seed(seed)
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(epoch)
            # an endless one has the length of its epochs
            indices: Any = [*itertools.islice(sampler, len(sampler))]
        if self.whole_batches and indices:
            self.batch_size = self.batch_size or statistics.mode(map(len, indices))
            sizes = {self.batch_size, *map(len, indices)}
            if self._training and len(sizes) > 1:
                raise self._refused(
                    f"yields batches of {min(sizes)} to {max(sizes)} samples. A step trains on "
                    "data.global_batch_size samples: yield batches of one size (drop_last), or "
                    "pass the DataLoader a sampler and a collate_fn instead of a batch_sampler."
                )
            indices = itertools.chain(*indices)
        return np.array([*map(self._index, indices)], np.int64)

    def _index(self, drawn: Any) -> int:
        try:
            return operator.index(drawn)
        except TypeError:
            raise self._refused(
                f"yields {drawn!r:.80} for a sample. Here a sample is known by its index, a whole "
                "number. For keys of another kind, yield their places in a list, and let the "
                "dataset's __getitem__ look them up there. Draw what goes with a whole batch, such "
                "as the size of its pictures, in collate_fn: its random numbers are the same in "
                "each run."
            ) from None

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self.owner}: {self.name} {why}")


@dataclass(kw_only=True)
class ReadLoader:
    """What a DataLoader loads.

    `draw` is None if the order is the dataset's own, or all of it `shuffled`.
    """

    dataset: Any  # map-style, or a Stream
    batch_size: int
    loader: DataLoader[Any]  # that was read
    draw: Draw | None = None
    shuffled: bool = False


def read_loader(loader: Any, split: str, *, owner: str, seed: int, limited: bool) -> ReadLoader:
    """Read a loader.

    For predictions ("predict") all samples are read once, in the order of the dataset, with or
    without shuffle and drop_last.

    Args:
        owner: the method that made it, for messages.
        seed: of the order.
        limited: data.train_limit is set.
    Raises:
        ConfigError: it is no DataLoader, or its order cannot be kept.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"{owner} returns a {type(loader).__name__}: return one torch DataLoader. To train on "
            "several datasets together, return a Dataset whose samples hold one of each."
        )
    if loader.batch_sampler is None:
        raise ConfigError(
            f"{owner}: DataLoader(batch_size=None) leaves batches to the dataset. Let the dataset "
            "yield single samples, and type the number of them as data.global_batch_size or pass "
            "DataLoader(batch_size=…)."
        )
    dataset: Any = loader.dataset
    training, predicting = split == "train", split == "predict"
    evaluating = not training and not predicting
    drops_last = evaluating and getattr(loader.batch_sampler, "drop_last", False)
    if isinstance(dataset, IterableDataset):
        stream = iterable.IterableStream(dataset, seed=seed, limited=limited)
        if drops_last:
            stream.drop_last(loader.batch_size or 1)
        return ReadLoader(dataset=stream, batch_size=loader.batch_size or 1, loader=loader)
    draw, shuffled = _order(loader, owner=owner, seed=seed, training=training)
    of_batches: Any = draw if draw is not None and draw.whole_batches else loader.batch_sampler
    size: int = of_batches.batch_size
    if draw is not None and predicting:
        raise ConfigError(
            f"{owner}: {draw.name} draws the samples, but predictions are a row for each sample in "
            "the order of the dataset. Return a DataLoader without a sampler from "
            "predict_dataloader: for some of the samples, of a torch.utils.data.Subset."
        )
    if evaluating and (draw is not None or shuffled):
        # which samples, and in which order: the same in each evaluation
        generator = torch.Generator().manual_seed(seed_of(f"{seed}/evaluation"))
        drawn = torch.randperm(len(dataset), generator=generator) if draw is None else draw(0)
        dataset, draw = Subset(dataset, drawn.tolist()), None
    if drops_last:
        dataset = Subset(dataset, range(len(dataset) // size * size))
    return ReadLoader(
        dataset=dataset, batch_size=size, loader=loader, draw=draw, shuffled=shuffled and training
    )


def _order(loader: DataLoader[Any], **options: Any) -> tuple[Draw | None, bool]:
    """Return who draws the samples (None: nobody), and whether they are all shuffled."""
    batch_sampler: Any = loader.batch_sampler
    # a batch sampler that is passed leaves no batch_size: else it is the loader's own
    if type(batch_sampler) is not BatchSampler and loader.batch_size is None:
        return Draw(batch_sampler, **options, whole_batches=True), False
    sampler: Any = batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return None, False
    if type(sampler) is DistributedSampler:  # its share is taken here, of all samples
        return None, sampler.shuffle
    all_once = type(sampler) is RandomSampler and not sampler.replacement
    if all_once and sampler.num_samples == len(loader.dataset):  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        return None, True
    return Draw(sampler, **options, whole_batches=False), False


def copied(sampler: Any) -> Any:
    """Return a copy of a sampler that shares datasets and tensors, or None if it cannot be
    copied.
    """
    try:
        shared = {
            id(value): value
            for value in vars(sampler).values()
            if isinstance(value, Dataset | Tensor)
        }
        return copy.deepcopy(sampler, shared)
    except Exception:
        return None
