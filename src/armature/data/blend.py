"""A weighted blend of text corpora: each epoch has the same share of each, whatever their
sizes.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, default_collate
from typing_extensions import override

from armature.data.base import Batch, Split
from armature.data.corpus import Corpus
from armature.data.sampler import permuted
from armature.data.text import TokenData, Windows
from armature.data.tokenizer import TOKENIZER_FILE
from armature.errors import ConfigError


class Blend:
    """Corpora by name, with one tokenizer: the one that is named, else one trained on the first
    corpus.

    Args:
        paths: the path of each corpus, by name.
        weights: share of each corpus in training, by name; they need not add up to 1. None: all
            alike.
        corpus: the other arguments of Corpus.
    """

    def __init__(
        self,
        paths: dict[str, Any],
        *,
        weights: dict[str, float] | None = None,
        tokenizer: str | None = None,
        **corpus: Any,
    ) -> None:
        self.paths, self.weights = paths, weights or dict.fromkeys(paths, 1.0)
        self.tokenizer, self.arguments = tokenizer, corpus

    def check(self) -> None:
        """Raise ConfigError if the weights do not fit, or files of a corpus are missing."""
        if self.weights.keys() != self.paths.keys() or not self.paths:
            raise ConfigError(
                f"data.weights names {', '.join(self.weights)}, and data.paths "
                f"{', '.join(self.paths)}: name the same."
            )
        problems: list[str] = []
        for name, path in self.paths.items():
            try:
                with _naming(name):
                    Corpus(path, tokenizer=self.tokenizer, **self.arguments).check()
            except ConfigError as error:
                problems += [each for each in error.problems if each not in problems]
        if problems:
            raise ConfigError(problems)

    def prepare(self) -> None:
        """Prepare all corpora. Several processes may call this at once."""
        self.check()
        _ = self.corpora

    @cached_property
    def corpora(self) -> dict[str, Corpus]:
        """The prepared corpora by name."""
        made, tokenizer = {}, self.tokenizer
        for name, path in self.paths.items():
            made[name] = corpus = Corpus(path, tokenizer=tokenizer, **self.arguments)
            with _naming(name):
                corpus.prepare()
            tokenizer = tokenizer or str(corpus.folder / TOKENIZER_FILE)
        return made

    @property
    def loaded_tokenizer(self) -> Any:
        return next(iter(self.corpora.values())).loaded_tokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of all corpora; the weights may change in a run."""
        each = [f"{name}:{corpus.fingerprint}" for name, corpus in self.corpora.items()]
        return hashlib.sha256("/".join(each).encode()).hexdigest()[:16]


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the key of a corpus in its problems, which name that of a run with one corpus."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            [each.replace("data.path", f"data.paths.{name}", 1) for each in error.problems]
        ) from error


class BlendData(TokenData):
    """Windows of several corpora. An epoch has as many samples as all corpora together.

    A corpus goes on in its own shuffled order from epoch to epoch: a heavy one comes again and
    again before a light one is through, and no window comes a second time before all others of its
    corpus. With `train_limit`, every epoch has the same windows.

    Validation and test read all windows of all corpora.
    """

    source: Blend

    def __init__(
        self, source: Blend, *, paths: Any = None, weights: Any = None, **arguments: Any
    ) -> None:
        # paths and weights are typed as data.paths, and `source` reads them
        super().__init__(source, **arguments)

    @override
    def dataset(self, split: Split) -> Dataset[Any]:
        return Joined([
            Windows(corpus.tokens(split), context=self.context, whole=split != "train")
            for corpus in self.source.corpora.values()
        ])  # fmt: skip

    @override
    def order(self, epoch: int, *, size: int, seed: int, limited: bool) -> NDArray[np.int64]:
        """Return the windows of an epoch: of corpus k, the next weight_k × N of its own order."""
        every = self._dataset("train")
        assert isinstance(every, Joined)
        weights = np.array([self.source.weights[name] for name in self.source.corpora])
        starts = np.round(np.cumsum([0, *weights]) / weights.sum() * size).astype(np.int64)
        chosen, offset = [], 0
        for number, windows in enumerate(every.datasets):
            own_size: int = len(windows)  # pyright: ignore[reportArgumentType]
            count = starts[number + 1] - starts[number]
            # of the corpus's own stream, in which its own epochs follow each other
            taken = (0 if limited else epoch) * count + np.arange(count)
            for own_epoch in np.unique(taken // own_size).tolist():
                places = taken[taken // own_size == own_epoch] % own_size
                own = permuted(places, size=own_size, seed=f"{seed}/{number}", epoch=own_epoch)
                chosen.append(own + offset)
            offset += own_size
        drawn = np.concatenate(chosen)
        return drawn[permuted(np.arange(size), size=size, seed=f"{seed}/blend", epoch=epoch)]


class Joined(ConcatDataset[Batch]):
    """The windows of several corpora, one corpus after the other."""

    def batch(self, indices: list[int]) -> Batch:
        """Return inputs and targets, each (B, T) and int64."""
        return default_collate([self[index] for index in indices])
