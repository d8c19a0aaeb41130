"""The base class of our data modules: a subclass defines the samples, and `feed.py` the rest."""

from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as L
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from armature.data.samples import Batch
from armature.data.stream import Stream
from armature.errors import ConfigError

__all__ = ["Batch", "DataModule", "Split", "Stream"]

Split = Literal["train", "val", "test", "predict"]


class DataModule(L.LightningDataModule):
    """Base class of data modules. A subclass defines the samples, in `dataset`.

    Batch sizes, order and ranks are the business of a `Feed` (data/feed.py), as for any other data
    module.

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

    def __init__(self) -> None:
        super().__init__()
        self._datasets: dict[Split, Dataset[Any] | Stream] = {}

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

    def order(self, epoch: int, *, size: int, seed: int, limited: bool) -> NDArray[Any]:
        """Return the indices of the `size` samples of an epoch, in their order.

        Override it for another order than all samples shuffled. It must depend on the arguments
        alone.

        Args:
            limited: every epoch is to have the same samples.
        """
        raise NotImplementedError

    def save_assets(self, run_dir: Path) -> None:
        """Copy to the run directory the files that using the trained model needs, such as a
        tokenizer.
        """

    def load_assets(self, run_dir: Path) -> None:
        """Use what `save_assets` has saved: called before other data are read for a trained
        model.
        """

    @property
    def known(self) -> dict[str, list[str]]:
        """The names that numbers stand for in the trained model: of "classes", say."""
        return {}

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

    @override
    def train_dataloader(self) -> Any:
        return self._loader("train")

    @override
    def val_dataloader(self) -> Any:
        return self._loader("val")

    @override
    def test_dataloader(self) -> Any:
        return self._loader("test")

    @override
    def predict_dataloader(self) -> Any:
        return self._loader(self.predict_split)

    def _loader(self, split: Split) -> Any:
        own = getattr(self.collate_fn, "__func__", None) is not DataModule.collate_fn
        return DataLoader(
            cast(Any, self._dataset(split)), batch_size=32,
            collate_fn=self.collate_fn if own else default_collate,
        )  # fmt: skip

    def _dataset(self, split: Split) -> Dataset[Any] | Stream:
        if split not in self._datasets:
            dataset = self.dataset(split)
            self._datasets[split] = cast(Any, []) if dataset is None else dataset
        return self._datasets[split]
