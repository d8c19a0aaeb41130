"""The data module that all data derive from: datasets become loaders in the global order, with a position to resume."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sized
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from armature.data.batching import Batches, plan_batches
from armature.data.prefetch import Prefetched
from armature.data.sampler import EvalSampler, TrainSampler
from armature.data.samples import Batch, Samples
from armature.data.stream import Stream
from armature.errors import ConfigError

log = logging.getLogger(__name__)

Split = Literal["train", "val", "test"]
__all__ = ["Batch", "DataModule", "Split", "Stream"]


class DataModule(L.LightningDataModule):
    """A subclass says what the samples are, in `dataset`; their order, batches, ranks and position are dealt with here.

    Args:
        global_batch_size: samples an optimizer step, over all ranks.
        micro_batch_size: samples that one data rank puts through the model at once; "auto": its whole share of a step.
        eval_batch_size: samples a rank and batch in validation and test.
        num_workers: loader processes a rank. 0 is fastest where a sample is a slice of memory.
        seed: of the sample order and of augmentation.
        train_limit: only this many of the training samples.
    """

    tokens_per_sample: int | None = None  # None for data that are not tokens

    def __init__(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int | str = "auto",
        eval_batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 0,
        train_limit: int | None = None,
    ) -> None:
        super().__init__()
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.eval_batch_size, self.num_workers = eval_batch_size, num_workers
        self.seed, self.train_limit = seed, train_limit
        self._datasets: dict[Split, Dataset[Any] | Stream] = {}
        self._loaders: dict[Any, DataLoader[Any]] = {}
        self._resumed = (0, 0)  # (samples, optimizer steps) seen when this run began

    def dataset(self, split: Split) -> Dataset[Any] | Stream | None:
        """A map-style dataset of {"inputs": Tensor, "targets": Tensor}, or a Stream. Called once a split.

        None for a split ("val", "test") that there is not.

        It may define `batch(indices) -> {"inputs", "targets"}`, which serves a whole batch at once and draws no random
        numbers, and `augment(sample, generator) -> sample`, which is called on training samples with a generator that
        depends on (seed, epoch, index) alone: the same under any number of ranks and workers, and after any resume.
        So is what `__getitem__` draws from the global generators.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method dataset(split).")

    def save_assets(self, run_dir: Path) -> None:
        """Copy into the run directory what the trained model cannot be used without, such as a tokenizer."""

    @property
    def train_size(self) -> int:
        """Samples an epoch (N)."""
        size = len(cast(Sized, self._dataset("train")))
        return size if self.train_limit is None else min(size, self.train_limit)

    @property
    def batches(self) -> Batches:
        """The batch arithmetic of this run.

        Raises:
            ConfigError: where the sizes do not divide.
        """
        return plan_batches(self.global_batch_size, self.micro_batch_size, self._rank_and_ranks()[1])

    @property
    def samples_seen(self) -> int:
        """Position in the stream of training samples: those of all optimizer steps that are done.

        It follows the trainer's count of steps, so that batches fetched ahead do not move it. Set it only after the
        trainer knows its step.
        """
        samples, steps = self._resumed
        return samples + (self._steps() - steps) * self.global_batch_size

    @samples_seen.setter
    def samples_seen(self, value: int) -> None:
        self._resumed = (value, self._steps())

    def epoch_position(self) -> tuple[int, int]:
        """Return the epoch that `samples_seen` lies in, and how many of its samples have been seen."""
        return divmod(self.samples_seen, self.train_size)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "samples_seen": self.samples_seen,
            "step": self._steps(),
            "train_size": self.train_size,
            "seed": self.seed,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = (state_dict["samples_seen"], state_dict["step"])
        if state_dict["train_size"] != self.train_size:
            log.warning(
                "The checkpoint saw %d of %d training samples an epoch; there are %d now, so the run goes on in "
                "another order than it would have had.",
                state_dict["samples_seen"],
                state_dict["train_size"],
                self.train_size,
            )
        if state_dict.get("seed", self.seed) != self.seed:
            log.warning(
                "The checkpoint's samples were in the order of data.seed=%s, and go on in that of data.seed=%s: until "
                "the epoch ends, some will come twice and some not at all.",
                state_dict["seed"],
                self.seed,
            )

    @override
    def train_dataloader(self) -> DataLoader[Any] | Prefetched:
        """The same loader at each call (its workers live on), for the epoch that the position is in by then."""
        rank, ranks = self._rank_and_ranks()
        batches = self.batches
        if self.trainer is not None and self.trainer.accumulate_grad_batches != batches.accumulate:
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={self.trainer.accumulate_grad_batches}), but a global batch of "
                f"{self.global_batch_size} is {batches.micro_batch_size} micro × {batches.accumulate} accumulation × "
                f"{ranks} data ranks. Pass accumulate_grad_batches={batches.accumulate}."
            )
        sampler = TrainSampler(
            self.train_size,
            seed=self.seed,
            batches=batches,
            rank=rank,
            position=lambda: self.samples_seen,
            epoch=self._epoch,
            shuffled=not isinstance(self._dataset("train"), Stream),
        )
        return self._loader("train", sampler, key=(rank, ranks))

    @override
    def val_dataloader(self) -> DataLoader[Any] | Prefetched:
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> DataLoader[Any] | Prefetched:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: Split) -> DataLoader[Any] | Prefetched:
        rank, ranks = self._rank_and_ranks()
        size = len(cast(Sized, self._dataset(split)))
        sampler = EvalSampler(size, batch_size=self.eval_batch_size, rank=rank, ranks=ranks)
        return self._loader(split, sampler, key=(rank, ranks))

    def _loader(
        self, split: Split, sampler: TrainSampler | EvalSampler, *, key: tuple[int, int]
    ) -> DataLoader[Any] | Prefetched:
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        pin = device.type == "cuda"
        if (split, *key, pin) not in self._loaders:
            if pin and self.num_workers:
                # It warns of loaders that are made anew each epoch. Ours is made once.
                warnings.filterwarnings("ignore", message="The combination of `DataLoader")
            self._loaders[split, *key, pin] = DataLoader(
                Samples(self._dataset(split), size=sampler.size, seed=self.seed, training=split == "train"),
                batch_sampler=sampler,
                num_workers=self.num_workers,
                # else each start of its workers would draw from the generator that the model draws from
                generator=torch.Generator().manual_seed(self.seed),
                collate_fn=_as_it_is,
                pin_memory=pin,
                persistent_workers=self.num_workers > 0,
            )
        loader = self._loaders[split, *key, pin]
        return Prefetched(loader, device) if pin else loader

    def _dataset(self, split: Split) -> Dataset[Any] | Stream:
        if split not in self._datasets:
            made = self.dataset(split)
            self._datasets[split] = cast(Any, []) if made is None else made
        return self._datasets[split]

    def _rank_and_ranks(self) -> tuple[int, int]:
        """On the data axis: the strategy knows it. One of one where there is no trainer or no second process."""
        if self.trainer is None:
            return 0, 1
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    def _steps(self) -> int:
        return self._resumed[1] if self.trainer is None else self.trainer.global_step

    def _epoch(self) -> int:
        """The epoch that the position is in; at its first step still the one before, until Lightning has closed that.

        Lightning asks for the length of an epoch whose last step is done: before its end, and after a resume there.
        """
        epoch, place = self.epoch_position()
        first_step = place < self.global_batch_size <= self.train_size
        closing = first_step and self.trainer is not None and self.trainer.current_epoch == epoch - 1
        return epoch - 1 if closing else epoch


def _as_it_is(batch: Any) -> Any:
    return batch  # `Samples` has collated it
