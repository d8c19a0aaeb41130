"""Cross-validation: `data.fold=2 data.folds=5` holds out the third of five parts of the samples.

A data module that holds samples out itself takes `fold` and `folds` (`columns.split_indices`). Of
any other one, a fold of its training samples takes the place of its validation samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from armature.data.base import DataModule, Split
from armature.data.batching import FOLD_KEYS
from armature.data.columns import split_indices
from armature.data.stream import Stream
from armature.errors import ConfigError


class Part(Subset[Any]):
    """Some samples of a dataset, with what else it offers, such as `batch` and `augment`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("dataset", "indices"):
            raise AttributeError(name)
        found = getattr(self.dataset, name)
        if name == "batch":
            return lambda indices: found([self.indices[i] for i in indices])
        return (lambda i: found(self.indices[i])) if name == "describe" else found


def hold_out(data: L.LightningDataModule, settings: Mapping[str, Any]) -> None:
    """Let a data module hold out a fold of its training samples.

    Raises ConfigError, then or when the samples are made, if they have no numbers.
    """
    fold, folds = (settings.get(key) for key in FOLD_KEYS)
    if fold is None or folds is None:
        return
    kind: Any = type(data)
    name = kind.__name__

    def part(dataset: Any, split: str) -> Part:
        text = getattr(data, "tokens_per_sample", None) is not None
        if text or isinstance(dataset, IterableDataset | Stream) or not hasattr(dataset, "__len__"):
            what = "texts that are cut into windows" if text else type(dataset).__name__
            raise refused(f"trains on {what}")
        parts = split_indices(len(dataset), val_fraction=0, test_fraction=0, fold=fold, folds=folds)
        return Part(dataset, parts[split].tolist())

    def refused(why: str) -> ConfigError:
        return ConfigError(
            f"data.folds={folds}: {name} {why}, of which no fold can be held out. Leave data.fold "
            f"and data.folds out, or let {name} take the arguments fold and folds, and hold the "
            "samples out itself."
        )

    class OfSamples(kind):
        def dataset(self, split: Split) -> Any:
            if split not in ("train", "val"):
                return super().dataset(split)
            return part(super().dataset("train"), split)

    class OfLoaders(kind):
        def train_dataloader(self) -> Any:
            return loader(super().train_dataloader(), "train")

        def val_dataloader(self) -> Any:
            return loader(super().train_dataloader(), "val")

    def loader(given: Any, split: str) -> DataLoader[Any]:
        drawn = getattr(given, "sampler", None)
        usual = isinstance(drawn, RandomSampler | SequentialSampler)
        if type(given) is not DataLoader or given.batch_size is None or not usual:
            by = f" with a {type(drawn).__name__}" if type(given) is DataLoader else ""
            raise refused(f"trains on a {type(given).__name__}{by}")
        training = split == "train"
        return DataLoader(
            part(given.dataset, split), batch_size=given.batch_size, collate_fn=given.collate_fn,
            shuffle=training and isinstance(drawn, RandomSampler), num_workers=given.num_workers,
            drop_last=training and given.drop_last, worker_init_fn=given.worker_init_fn,
            persistent_workers=given.persistent_workers,
        )  # fmt: skip

    folded = OfSamples if isinstance(data, DataModule) else OfLoaders
    folded.__name__, folded.__qualname__ = name, kind.__qualname__
    folded.__module__ = kind.__module__
    data.__class__ = folded
