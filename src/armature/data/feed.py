"""Which samples a rank gets next: the position in the training data, and loaders that follow it.

`sampler.py` turns a position into samples, `batching.py` a global batch into micro-batches. A
`Feed` keeps the position, and gives a loader our batch sampler. Our data modules are feeds
themselves (`base.py`). For a LightningDataModule of somebody else, `UsersFeed`
(`users_feed.py`) replaces each loader that Lightning passes to `Strategy.process_dataloader`.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from armature.data import namesakes
from armature.data.batching import Batches, plan_batches
from armature.data.prefetch import (
    PrefetchLoader,
    reads_ahead,
    sees_batches_off_device,
)
from armature.data.sampler import EvalSampler, TrainSampler
from armature.data.samples import (
    BeginWorker,
    Samples,
    collated,
    has_targets,
    preserved_generators,
)
from armature.errors import ConfigError
from armature.training.progress import completed_batches

log = logging.getLogger(__name__)
namesakes.install()  # before any class of users is found

Split = Literal["train", "val", "test", "predict"]


class FedLoader(DataLoader[Any]):
    """Added to the class of a loader that a feed has given its batch sampler."""

    @override
    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # from the first `next` on: workers copy the dataset then, and on_train_start may change it
        yield from super().__iter__()

    @override
    def __len__(self) -> int:
        return len(self.batch_sampler)  # pyright: ignore[reportArgumentType]


class Feed:
    """The position in the training data, and what loaders need to follow it.

    Args:
        global_batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: samples that one data rank puts through the model at once; "auto": its
            whole share of a step.
        eval_batch_size: samples per rank and batch in validation and test.
        num_workers: loader processes per rank. 0 is fastest if a sample is a slice of memory.
        seed: seed of the sample order and of augmentation.
        train_limit: train on this many samples only, "batch": on one global batch; None: on all.
        skip_steps: numbers of steps, as the run counts them if earlier ones of the list are left
            out: the samples of each are left out, and what comes after them moves up.

    Attributes:
        batch_note: what the line at the start of a run adds about the batch.
        drawn_together: the class of a batch sampler whose batches hold samples that belong
            together; None: there is none.
    """

    batch_note: str = ""
    drawn_together: str | None = None
    trainer: Any

    def __init__(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int | str = "auto",
        eval_batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 0,
        train_limit: int | str | None = None,
        skip_steps: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.eval_batch_size, self.num_workers = eval_batch_size, num_workers
        self.seed, self.train_limit = seed, train_limit
        # global batches per epoch, or a share of it
        self.limit_train_batches: int | float | None = None
        self._empty = set[str]()  # splits without samples that have been named
        self.skip_steps = sorted({*skip_steps})
        # parts (start, length) of the order of samples, by step: those of steps that are made
        self._skipped: dict[int, tuple[int, int]] = {}
        # training samples, before hooks could change the dataset
        self._first_size: int | None = None
        self._resumed = (0, 0)  # (samples, global batches) seen when this run began

    @property
    def data(self) -> Any:
        """The data module."""
        return self

    @property
    def _train_samples(self) -> int:
        """Samples that an epoch's order is made of."""
        raise NotImplementedError

    def _train_sampler(self) -> TrainSampler:
        raise NotImplementedError

    # ------------------------------------------------------------ the position
    @property
    def train_size(self) -> int:
        """Samples per epoch (N): with `limit_train_batches`, those of the first batches of each
        epoch's order.

        Raises:
            ConfigError: the number of samples has changed since it was first asked for.
        """
        size, limit = self._train_samples, self.limit_train_batches
        if not size:
            raise ConfigError(
                f"data: {type(self).__name__} has no training samples: dataset('train') is empty."
            )
        self._first_size = size if self._first_size is None else self._first_size
        if size != self._first_size:
            raise ConfigError(
                f"data: there were {self._first_size} training samples when the run began, and "
                f"there are {size} now. "
                "Steps and positions count by their number, so it must stay. Let the dataset have "
                "one length from the "
                "start, and return a sample that it knows at each index: known[index % len(known)]."
            )
        if limit is None:
            return size
        batches = (
            limit if isinstance(limit, int) else max(1, int(limit * size / self.global_batch_size))
        )
        return (
            size
            if limit == 1.0 and isinstance(limit, float)
            else min(size, batches * self.global_batch_size)
        )

    def _limited(self, size: int) -> int:
        limit = self.global_batch_size if self.train_limit == "batch" else self.train_limit
        return size if limit is None else min(size, int(limit))

    @property
    def batches(self) -> Batches:
        """The batch arithmetic of this run. Raises ConfigError if the sizes do not divide."""
        return plan_batches(
            self.global_batch_size, self.micro_batch_size, self._rank_and_ranks()[1]
        )

    @property
    def samples_seen(self) -> int:
        """Position in the stream of training samples: the number of samples in all completed global
        batches.

        It is computed from the trainer's count of global batches, so batches fetched ahead do not
        change it. Set it only after the trainer knows its step.
        """
        samples, steps = self._resumed
        return samples + (self._steps() - steps) * self.global_batch_size

    @samples_seen.setter
    def samples_seen(self, value: int) -> None:
        self._skipped = {k: part for k, part in self._parts().items() if k <= self._steps()}
        self._resumed = (value, self._steps())

    def epoch_position(self) -> tuple[int, int]:
        """Return the epoch that `samples_seen` lies in, and how many of its samples have been
        seen.
        """
        return divmod(self.samples_seen, self.train_size)

    def state_dict(self) -> dict[str, Any]:
        return {
            "samples_seen": self.samples_seen,
            "step": self._steps(),
            "train_size": self.train_size,
            "seed": self.seed,
            "skipped": [
                [step, *part] for step, part in self._parts().items() if step <= self._steps()
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        resumed = (state_dict["samples_seen"], state_dict["step"])
        # a checkpoint is loaded once more after users' hooks of the start
        again, self._resumed = self._resumed == resumed != (0, 0), resumed
        self._skipped = {step: (start, size) for step, start, size in state_dict.get("skipped", ())}
        made = {step for step in self.skip_steps if step <= state_dict["step"]}
        if late := sorted(made - self._skipped.keys()):
            raise ConfigError(
                f"data.skip_steps={late}: the checkpoint is of step {state_dict['step']}, so these "
                "steps are made. Type resume= with an earlier checkpoint, or leave them out of "
                "data.skip_steps."
            )
        if again:
            return
        if state_dict["train_size"] != self.train_size:
            log.warning(
                "The checkpoint saw %d of %d training samples per epoch. There are %d now, so the "
                "run continues in "
                "another sample order than without the change.",
                state_dict["samples_seen"], state_dict["train_size"], self.train_size,
            )  # fmt: skip
        if state_dict.get("seed", self.seed) != self.seed:
            log.warning(
                "The checkpoint's samples were in the order of data.seed=%s, and continue in that "
                "of data.seed=%s: "
                "until the epoch ends, some samples come twice and some not at all.",
                state_dict["seed"], self.seed,
            )  # fmt: skip

    def _order_arguments(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batches": self.batches,
            "rank": self._rank_and_ranks()[0],
            "epoch": self._epoch,
            "position": lambda: self.samples_seen,
            "population": self._train_samples,
            "left_out": lambda: self._parts().values(),
        }

    def _parts(self) -> dict[int, tuple[int, int]]:
        """Return the parts (start, length) of the order of samples that are left out, by step."""
        (seen, made), parts = self._resumed, dict(self._skipped)
        for step in (step for step in self.skip_steps if step > made):
            left_out = sum(length for _, length in parts.values())
            start = seen + (step - 1 - made) * self.global_batch_size + left_out
            parts[step] = (start, self.global_batch_size)
        return parts

    def indices_of_step(self, position: int) -> list[list[int]]:
        """Return the indices of the samples that this rank takes in the step at a position, per
        micro-batch.
        """
        sampler = self._train_sampler()
        return [[key % sampler.population for key in keys] for keys in sampler.step_keys(position)]

    def _rank_and_ranks(self) -> tuple[int, int]:
        """Return rank and size on the data axis, from the strategy; (0, 1) without a trainer or a
        second process.
        """
        if self.trainer is None:
            return 0, 1
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    def skip_epoch(self) -> None:
        """Leave out the rest of this epoch's samples."""
        self.samples_seen = (self.epoch_position()[0] + 1) * self.train_size

    def _steps(self) -> int:
        return self._resumed[1] if self.trainer is None else completed_batches(self.trainer)

    def _epoch(self) -> int:
        """Return the epoch that the position is in, or the one before if Lightning has not closed
        that yet.

        Lightning asks for the length of an epoch after its last step: before closing it, and after
        a resume there.
        """
        epoch, place = self.epoch_position()
        first_step = place < self.global_batch_size <= self.train_size
        closing = (
            first_step and self.trainer is not None and self.trainer.current_epoch == epoch - 1
        )
        return epoch - 1 if closing else epoch

    # ------------------------------------------------------------ loaders
    def feed(
        self,
        loader: DataLoader[Any],
        dataset: Any,
        sampler: TrainSampler | EvalSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
        foreign: bool = False,
    ) -> DataLoader[Any]:
        """Return a copy of a loader, of its class, that takes samples in our order.

        Args:
            foreign: see `Samples`.
        """
        training = isinstance(sampler, TrainSampler)
        pin = self._device().type == "cuda"
        if pin and num_workers:
            # DataLoader warns about loaders that are made anew each epoch. Ours is made once.
            warnings.filterwarnings("ignore", message="The combination of `DataLoader")
        samples = Samples(
            dataset,
            size=sampler.population,
            seed=self.seed,
            training=training,
            collate_fn=collate_fn,
            foreign=foreign,
        )
        fed = copy.copy(loader)
        fed.__class__ = type(type(loader).__name__, (FedLoader, type(loader)), {})
        # torch lets none of these be set by name once a loader is made
        vars(fed).update(
            dataset=samples,
            batch_sampler=sampler,
            batch_size=sampler.batch_size,  # DeepSpeed asks for it
            collate_fn=collated,
            num_workers=num_workers,
            prefetch_factor=(loader.prefetch_factor or 2) if num_workers else None,
            persistent_workers=loader.persistent_workers and num_workers > 0,
            pin_memory=pin,
            worker_init_fn=BeginWorker(loader.worker_init_fn),
            # otherwise each start of its workers would draw from the generator that the model
            # draws from
            generator=torch.Generator().manual_seed(self.seed),
            _dataset_kind=0,  # map-style, also of an IterableDataset
        )
        return fed

    def ahead(self, loader: DataLoader[Any]) -> Any:
        """Return the loader, or one that copies a batch ahead to the device where nobody minds."""
        owners = (self.data, getattr(self.trainer, "lightning_module", None))
        if (
            not loader.pin_memory
            or any(sees_batches_off_device(owner) for owner in owners if owner is not None)
            or not reads_ahead(self.data, workers=loader.num_workers > 0)
        ):
            return loader
        return PrefetchLoader(loader, self._device())

    def _device(self) -> torch.device:
        return torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device

    def _evaluation_sampler(
        self, dataset: Any, batch_size: int, *, pads: bool = True
    ) -> EvalSampler:
        rank, ranks = self._rank_and_ranks()
        return EvalSampler(len(dataset), batch_size=batch_size, rank=rank, ranks=ranks, pads=pads)

    def _say_empty(self, loader: str, owner: str) -> None:
        """Say once that a loader for evaluation has no samples.

        Args:
            loader: its name, such as "val" or "val/0".
        """
        if loader not in self._empty and self._rank_and_ranks()[0] == 0:
            log.warning("data: %s has no samples for %s: nothing is measured there.", owner, loader)
        self._empty.add(loader)

    def _check_padding(self, loader: DataLoader[Any], split: str) -> None:
        """Raise ConfigError if a rank would have no sample in a batch of an evaluation, and none
        can stand in for it.
        """
        sampler: Any = loader.batch_sampler
        limit = getattr(self.trainer, f"limit_{split}_batches", 1.0)
        reaches_last = limit >= (len(sampler) if isinstance(limit, int) else 1.0)
        if not (sampler.has_padding and reaches_last):
            return
        with preserved_generators():
            if has_targets(loader.dataset.__getitems__([0])):  # pyright: ignore[reportAttributeAccessIssue]
                return
        size, ranks, rest = sampler.size, sampler.ranks, sampler.size % sampler.ranks
        remedy = f"Give it at least {ranks} samples, or evaluate on at most {size} ranks."
        if size > ranks:
            remedy = (
                f"Leave {rest} of them out (torch.utils.data.Subset(dataset, "
                f"range({size - rest}))), or type data.eval_batch_size=2 if the samples can be "
                "stacked or a collate_fn pads them."
            )
        raise ConfigError(
            f"data: {type(self.data).__name__} has {size} samples for {split}, but {ranks} ranks "
            f"with batches of {sampler.batch_size} need one for each rank in every batch, and only "
            f'a batch with "targets" can be filled up with samples that do not count. {remedy}'
        )
