"""The base class of our data modules: a subclass defines the samples, and `feed.py` the rest."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from armature.data import iterable, memory
from armature.data.feed import Feed, Split
from armature.data.prefetch import UnchangedLoader
from armature.data.sampler import EvalSampler, TrainSampler
from armature.data.samples import Batch
from armature.data.stream import Stream
from armature.errors import ConfigError

__all__ = ["Batch", "DataModule", "Split", "Stream"]


class DataModule(Feed, L.LightningDataModule):
    """Base class of data modules. A subclass defines the samples, in `dataset`.

    `Feed` computes their order, batches and ranks, and has the arguments.

    Attributes:
        tokens_per_sample: None for data that are not tokens.
        predict_split: what scripts/predict.py reads: "predict" if `dataset("predict")` returns
            something.
        prepares_on_every_rank: `prepare_data` may run on all ranks at once, because it locks what
            it writes.
    """

    tokens_per_sample: int | None = None
    predict_split: Split = "test"
    prepares_on_every_rank: bool = True

    def __init__(self, **loader: Any) -> None:
        super().__init__(**loader)
        self._datasets: dict[Split, Dataset[Any] | Stream] = {}
        self._loaders: dict[Any, DataLoader[Any]] = {}

    def set_up(self, stage: str) -> None:
        """Set up the data of a stage."""
        self.setup(stage)

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
    @override
    def _train_samples(self) -> int:
        return self._limited(len(cast(Sized, self._dataset("train"))))

    @override
    def train_dataloader(self) -> Any:
        """Return the loader for the epoch that holds the position: the same at each call, its
        workers stay alive.
        """
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
        return self._loader("train", self._dataset("train"), self._train_sampler())

    def train_loader(self) -> Any:
        """Return the training loader, without a Trainer."""
        return self.train_dataloader()

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

    def replace(self, loader: Any) -> Any:
        """Return a loader that Lightning has got from this module: the methods above have fed it.

        Raises:
            ConfigError: it is a training loader of a subclass's own.
        """
        training = self.trainer.state.stage.dataloader_prefix == "train"
        if training and not isinstance(getattr(loader, "batch_sampler", None), TrainSampler):
            raise ConfigError(
                f"data: {type(self).__name__}.train_dataloader returns a {type(loader).__name__} "
                "of its own, which knows neither the ranks nor the position of a resume. Return "
                "samples from dataset(split) and batches from collate_fn(samples) instead, or "
                "derive the class from LightningDataModule, whose loaders are fed (docs/data.md)."
            )
        return loader

    @override
    def _train_sampler(self) -> TrainSampler:
        shuffled = not isinstance(self._dataset("train"), Stream)
        return TrainSampler(self.train_size, shuffled=shuffled, **self._order_arguments())

    def _evaluation_loader(self, split: Split) -> Any:
        dataset = self._dataset(split)
        if not len(cast(Sized, dataset)) and not hasattr(self, "fractions"):
            # else data/splits.py says so, unless it is wanted
            self._say_empty(split, type(self).__name__)
        sampler = self._evaluation_sampler(dataset, self.eval_batch_size)
        return self._loader(split, dataset, sampler)

    def _loader(self, name: str, dataset: Any, sampler: TrainSampler | EvalSampler) -> Any:
        """Return the loader of a name, made at the first call."""
        training = isinstance(sampler, TrainSampler)
        key = (name, *self._rank_and_ranks(), self._device())
        if key not in self._loaders:
            own = getattr(self.collate_fn, "__func__", None) is not DataModule.collate_fn
            # a hook may read evaluation data while the loop does: its own workers serve it
            persistent = training and self.num_workers > 0
            made = DataLoader[Any](
                dataset, num_workers=self.num_workers, persistent_workers=persistent
            )
            self._loaders[key] = self.feed(
                made, dataset, sampler, collate_fn=self.collate_fn if own else None,
                num_workers=self.num_workers,
            )  # fmt: skip
            if name in ("val", "test"):
                self._check_padding(self._loaders[key], name)
        return self.ahead(self._loaders[key])

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
            self._datasets[split] = cast(Any, []) if dataset is None else dataset
        return self._datasets[split]
