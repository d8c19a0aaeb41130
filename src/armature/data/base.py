"""The base class of all data modules: it turns datasets into loaders, and owns the position in the
training data.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from armature.data import iterable, memory
from armature.data.batching import Batches, plan_batches
from armature.data.eval_loader import EvalLoader, check_padding
from armature.data.prefetch import (
    PrefetchLoader,
    UnchangedLoader,
    reads_ahead,
    sees_batches_off_device,
)
from armature.data.sampler import EpochSampler, EvalSampler, TrainSampler
from armature.data.samples import Batch, BeginWorker, Samples, collated
from armature.data.stream import Stream
from armature.data.train_loader import TrainLoader, of_its_own
from armature.errors import ConfigError
from armature.training.progress import completed_batches

log = logging.getLogger(__name__)

Split = Literal["train", "val", "test", "predict"]
__all__ = ["Batch", "DataModule", "Split", "Stream"]


class DataModule(L.LightningDataModule):
    """Base class of data modules. A subclass defines the samples, in `dataset`.

    This class computes their order, batches and ranks. It also owns the position in the training
    data: others ask
    `samples_seen` and `epoch_position()` instead of counting themselves.

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
        tokens_per_sample: None for data that are not tokens.
        predict_split: what scripts/predict.py reads: "predict" if `dataset("predict")` returns
            something.
        batch_note: what the line at the start of a run adds about the batch.
        prepares_on_every_rank: `prepare_data` may run on all ranks at once, because it locks what
            it writes.
    """

    tokens_per_sample: int | None = None
    predict_split: Split = "test"
    batch_note: str = ""
    prepares_on_every_rank: bool = True

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
        self._datasets: dict[Split, Dataset[Any] | Stream] = {}
        self._loaders: dict[Any, DataLoader[Any]] = {}
        # loaders that have been named; `_say_steps` has spoken
        self._empty, self._said_steps = (set[str](), False)
        self.skip_steps = sorted({*skip_steps})
        # parts (start, length) of the order of samples, by step: those of steps that are made
        self._skipped: dict[int, tuple[int, int]] = {}
        # training samples, before hooks could change the dataset
        self._first_size: int | None = None
        self._resumed = (0, 0)  # (samples, global batches) seen when this run began

    def dataset(self, split: Split) -> Dataset[Any] | Stream | None:
        """Return a map-style dataset of {"inputs": Tensor, "targets": Tensor}, or a Stream.

        Called once per split.

        An IterableDataset is read as a Stream (data/iterable.py). Samples may have another form if
        the task reads it. Return None if there is no such split ("val", "test"). The dataset may
        define `batch(indices) -> {"inputs", "targets"}`, which serves a whole batch at once and
        must draw no random numbers. It may define `augment(sample, generator) -> sample`, which is
        called on training samples. The generator depends on (seed, epoch, index) alone, so
        augmentation is the same under any number of ranks and workers, and after any resume. The
        same holds for what `__getitem__` draws from the global generators. It may define
        `describe(index)`, a dict that a row of predictions begins with, such as the sample's file.
        """
        raise ConfigError(
            f"data: {type(self).__name__} needs a method dataset(split). Write it "
            "(docs/your-own.md)."
        )

    def collate_fn(self, samples: list[Any]) -> Any:
        """Return a batch of a list of samples.

        Override it for samples that cannot be stacked, such as ragged ones.

        Random numbers from the global generators depend on the batch's first sample alone.
        """
        return default_collate(samples)

    def save_assets(self, run_dir: Path) -> None:
        """Copy to the run directory the files that using the trained model needs, such as a
        tokenizer.
        """

    def load_assets(self, run_dir: Path) -> None:
        """Use what `save_assets` has saved: called before other data are read for a trained
        model.
        """

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes in the order of their numbers, if the attribute `classes` has
        them.
        """
        names = getattr(self, "classes", None)
        return names if isinstance(names, list) else None

    @property
    def found_sizes(self) -> dict[str, int]:
        """Sizes that the training data ask of the model, by its argument, as far as only the data
        tell them.
        """
        return {}

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

    @property
    def _train_samples(self) -> int:
        """Samples that an epoch's order is made of."""
        return self._limited(len(cast(Sized, self._dataset("train"))))

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

    @override
    def state_dict(self) -> dict[str, Any]:
        train = self._dataset("train")
        return {
            "samples_seen": self.samples_seen,
            "step": self._steps(),
            "train_size": self.train_size,
            "seed": self.seed,
            "skipped": [
                [step, *part] for step, part in self._parts().items() if step <= self._steps()
            ],
            **(
                {"begun": train.begun.state_dict()}
                if isinstance(train, iterable.IterableStream)
                else {}
            ),
        }

    @override
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
        if isinstance(train := self._dataset("train"), iterable.IterableStream):
            train.begun.load_state_dict(state_dict.get("begun", {}))
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

    @override
    def train_dataloader(self) -> DataLoader[Any] | PrefetchLoader:
        """Return the loader for the epoch that holds the position: the same at each call, its
        workers stay alive.

        A hook that calls this gets a new loader instead, of all samples of the epoch, on every
        rank.
        """
        if not self._asked_by_loop():
            whole = EpochSampler(self._train_sampler())
            self._say_steps()
            return self._loader("train", self._dataset("train"), whole, training=True, fresh=True)
        batches = self.batches
        if self.trainer is not None and self.trainer.accumulate_grad_batches != batches.accumulate:
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={self.trainer.accumulate_grad_batches}), but a "
                "global batch of "
                f"{self.global_batch_size} is {batches.micro_batch_size} micro × "
                f"{batches.accumulate} accumulation × "
                f"{batches.data_ranks} data ranks. Pass "
                f"accumulate_grad_batches={batches.accumulate}."
            )
        return self._loader(
            "train", self._dataset("train"), self._train_sampler(for_loop=True), training=True
        )

    def check_train_loader(self, loader: Any) -> None:
        """Raise ConfigError for a training loader that this class has not made."""
        if not isinstance(loader, TrainLoader | PrefetchLoader):
            raise ConfigError(f"data: {type(self).__name__}.{of_its_own(loader)}")

    def _asked_by_loop(self) -> bool:
        """Return whether the training loop asks for data; True without our Trainer."""
        return getattr(getattr(self.trainer, "fit_loop", None), "asks_for_data", True)

    @override
    def val_dataloader(self) -> Any:
        return self._evaluation_loader("val")

    @override
    def test_dataloader(self) -> Any:
        return self._evaluation_loader("test")

    @override
    def predict_dataloader(self) -> Any:
        dataset = self._dataset(self.predict_split)
        sampler = self._evaluation_sampler(dataset, self.eval_batch_size, pads=False)
        return UnchangedLoader(self._loader("predictions", dataset, sampler))

    def _train_sampler(self, *, for_loop: bool = False, **arguments: Any) -> TrainSampler:
        """Return a sampler. What one draws `for_loop` is what the run trains on."""
        shuffled = not isinstance(self._dataset("train"), Stream)
        return TrainSampler(
            self.train_size, shuffled=shuffled, **self._order_arguments() | arguments
        )

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

    def _evaluation_loader(self, split: Split) -> Any:
        dataset = self._dataset(split)
        if not len(cast(Sized, dataset)):
            if not hasattr(self, "fractions"):  # else data/columns.py says so, unless it is wanted
                self._say_empty(split, type(self).__name__)
            warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero")
        loader = self._loader(
            split, dataset, self._evaluation_sampler(dataset, self.eval_batch_size)
        )
        check_padding(loader, name=split, owner=type(self).__name__, trainer=self.trainer)
        return loader

    def _say_empty(self, loader: str, owner: str) -> None:
        """Say once that a loader for evaluation has no samples.

        Args:
            loader: its name, such as "val" or "val/0".
        """
        if loader not in self._empty and self._rank_and_ranks()[0] == 0:
            log.warning("data: %s has no samples for %s: nothing is measured there.", owner, loader)
        self._empty.add(loader)

    def _say_steps(self) -> None:
        """Say once what the length of the loader of a whole epoch counts, if it is not the
        micro-batches.
        """
        if self.batches.accumulate > 1 and not self._said_steps and self._rank_and_ranks()[0] == 0:
            log.info(
                "trainer.datamodule.train_dataloader() has batches of data.global_batch_size=%d "
                "samples: a "
                "forward of one may need more memory than a step. Its length counts optimizer "
                "steps: do not divide it "
                "by trainer.accumulate_grad_batches=%d.",
                self.global_batch_size, self.batches.accumulate,
            )  # fmt: skip
        self._said_steps = True

    def _evaluation_sampler(
        self, dataset: Any, batch_size: int, *, pads: bool = True
    ) -> EvalSampler:
        rank, ranks = self._rank_and_ranks()
        return EvalSampler(len(dataset), batch_size=batch_size, rank=rank, ranks=ranks, pads=pads)

    def _loader(
        self,
        name: str,
        dataset: Any,
        sampler: TrainSampler | EpochSampler | EvalSampler,
        *,
        training: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        foreign: bool = False,
        fresh: bool = False,
        persistent_workers: bool = True,
        worker_init_fn: Callable[[int], Any] | None = None,
        users_sampler: Any = None,
        **options: Any,
    ) -> DataLoader[Any] | PrefetchLoader:
        """Return the loader of a name, made at the first call.

        Args:
            foreign: see `Samples`; its collate_fn is given.
            fresh: return a new loader, which the training loop does not use.
            users_sampler: what users get as the loader's `sampler`, to set what their own reads.
            options: arguments of torch's DataLoader.
        """
        device = (
            self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        )
        pin = device.type == "cuda"
        key = (name, *self._rank_and_ranks(), pin)
        if (
            collate_fn is None
            and getattr(self.collate_fn, "__func__", None) is not DataModule.collate_fn
        ):
            collate_fn = self.collate_fn
        options = {"num_workers": self.num_workers, **options}
        workers = options["num_workers"] > 0

        def make(kind: type[DataLoader[Any]], **arguments: Any) -> DataLoader[Any]:
            samples = Samples(
                dataset,
                size=sampler.population,
                seed=self.seed,
                training=training,
                collate_fn=collate_fn,
                foreign=foreign,
            )
            loader = kind(
                samples,
                batch_sampler=sampler,
                worker_init_fn=BeginWorker(worker_init_fn),
                # otherwise each start of its workers would draw from the generator that the model
                # draws from
                generator=torch.Generator().manual_seed(self.seed),
                collate_fn=collated,
                pin_memory=pin,
                **options | arguments,
            )
            vars(loader)["batch_size"] = sampler.batch_size  # torch has None beside a batch_sampler
            if users_sampler is not None:
                vars(loader)["sampler"] = users_sampler
            return loader

        if fresh:
            return make(DataLoader)
        if key not in self._loaders:
            if pin and workers:
                # DataLoader warns about loaders that are made anew each epoch. Ours is made once.
                warnings.filterwarnings("ignore", message="The combination of `DataLoader")
            persistent: dict[str, Any] = {"persistent_workers": workers and persistent_workers}
            if training:
                whole = partial(
                    self._train_sampler, position=lambda: self._train_sampler().first_position()
                )
                self._loaders[key] = make(
                    TrainLoader,
                    asked_by_loop=self._asked_by_loop,
                    **persistent,
                    whole_epoch=lambda: self._loader(
                        name, dataset, whole(), training=True, fresh=True
                    ),
                )
            else:
                self._loaders[key] = make(
                    EvalLoader, another=lambda: make(DataLoader), **persistent
                )
        ahead = pin and self._prefetches() and reads_ahead(self, workers=workers)
        return PrefetchLoader(self._loaders[key], device) if ahead else self._loaders[key]

    def _prefetches(self) -> bool:
        """Return whether batches may be on the device before any code of the user's sees them."""
        owners = (self, getattr(self.trainer, "lightning_module", None))
        return not any(sees_batches_off_device(owner) for owner in owners if owner is not None)

    def _dataset(self, split: Split) -> Dataset[Any] | Stream:
        if split not in self._datasets:
            limited = split == "train" and self.train_limit is not None
            with memory.reporting(f"the {split} split of {type(self).__name__}", self):
                dataset = iterable.adapt(self.dataset(split), seed=self.seed, limited=limited)
            if dataset is not None and not hasattr(dataset, "__len__"):
                raise ConfigError(
                    f"data: {type(self).__name__}.dataset('{split}') returns a "
                    f"{type(dataset).__name__}, which has no "
                    "__len__. Return a Dataset with __len__ and __getitem__, or an IterableDataset."
                )
            if split == "train" and isinstance(dataset, iterable.IterableStream):
                dataset.check_repeats()
            self._datasets[split] = cast(Any, []) if dataset is None else dataset
        return self._datasets[split]

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
