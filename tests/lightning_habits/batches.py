"""Batches and loaders in the forms that data modules give them."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    get_worker_info,
)
from torch.utils.data.dataset import StackDataset, random_split

from tests.lightning_habits import data, plain
from tests.lightning_habits.regression import Regressor

Sample = namedtuple("Sample", "x y")


class Typed(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    name: str


class FromFields(Regressor):
    """Reads batches by the names x and y."""

    def shared_step(self, batch, stage):
        loss = F.mse_loss(self(batch.x), batch.y)
        self.log(
            f"{stage}/loss",
            loss,
            on_step=False,
            on_epoch=True,
            batch_size=len(batch.x),
            sync_dist=True,
        )
        return loss


class FromDict(Regressor):
    """Reads dicts, in which some entries are None, strings or lists."""

    def shared_step(self, batch, stage):
        assert batch["none"] is None
        assert isinstance(batch["names"][0], str)
        return super().shared_step((torch.stack(list(batch["x"])), batch["deep"][0]["y"]), stage)


def named(index: int) -> Sample:
    return Sample(*data.regression(index))


def typed(index: int) -> Typed:
    return Typed(*data.regression(index), name=str(index))


class NamedTuples(plain.Vectors):
    sample = staticmethod(named)


class TypedTuples(plain.Vectors):
    sample = staticmethod(typed)


def mixed(samples: list[Any]) -> dict[str, Any]:
    return {
        "x": [x for x, _ in samples],
        "deep": ({"y": torch.stack([y for _, y in samples])}, None),
        "none": None,
        "names": ["a"] * len(samples),
        "empty": [],
        "count": len(samples),
    }


class Collated(plain.Vectors):
    """Its loaders share a collate_fn."""

    collate = staticmethod(mixed)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8, collate_fn=self.collate)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=8, collate_fn=self.collate)


class Dicts(Collated):
    pass


class OwnBatch:
    """A batch class with `to` and pin_memory, as PyTorch Geometric's."""

    def __init__(self, samples):
        self.x, self.y = (torch.stack(part) for part in zip(*samples, strict=True))

    def to(self, device, non_blocking=False):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self

    def pin_memory(self):
        return self


class OwnBatches(Collated):
    collate = OwnBatch


def detection(index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    x, label = data.image(index)
    boxes = torch.rand(1 + index % 3, 4, generator=data.generator(500 + index))
    return x, {"boxes": boxes, "labels": torch.full((len(boxes),), label)}


class Detections(Collated):
    sample = staticmethod(detection)
    collate = staticmethod(lambda samples: tuple(zip(*samples, strict=True)))


class Arrays(Dataset):
    """NumPy arrays, Python numbers and float64."""

    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        x, y = data.regression(self.indices[i])
        return {"x": x.numpy().astype(np.float32), "y": float(y), "weight": 1, "name": f"{i}"}


class FromArrays(Regressor):
    def shared_step(self, batch, stage):
        x, y = batch["x"], batch["y"].float().unsqueeze(1) * batch["weight"].unsqueeze(1)
        return super().shared_step((x, y), stage)


class ArrayData(plain.Vectors):
    def setup(self, stage=None):
        self.train, self.val, self.test = (
            Arrays(range(48)),
            Arrays(range(100, 116)),
            Arrays(range(200, 216)),
        )


class Joined(plain.Vectors):
    """ConcatDataset, and random_split by shares."""

    def setup(self, stage=None):
        parts = [data.Samples(self.sample, range(40)), data.Samples(self.sample, range(60, 84))]
        joined = ConcatDataset(parts)
        generator = torch.Generator().manual_seed(3)
        self.train, self.val = random_split(joined, [0.75, 0.25], generator=generator)
        self.test = data.Samples(self.sample, range(200, 216))


class Stacked(plain.Vectors):
    """StackDataset of inputs and targets."""

    def setup(self, stage=None):
        super().setup(stage)
        xs = [data.regression(i)[0] for i in range(48)]
        ys = [data.regression(i)[1] for i in range(48)]
        self.train = StackDataset(xs, ys)


class Whole(Dataset):
    """`__getitems__`, which torch's loader calls for a whole batch."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return data.regression(index)

    def __getitems__(self, indices):
        return [data.regression(index) for index in indices]


class BatchGetter(plain.Vectors):
    def setup(self, stage=None):
        super().setup(stage)
        self.train = Whole()


class Noisy(Dataset):
    """Augmentation from the global generators of torch, NumPy and Python."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        import random

        x, y = data.regression(index)
        noise = torch.randn(8) * 0.01 + float(np.random.rand()) * 0.01 + random.random() * 0.01
        return x + noise, y


class Augmented(plain.Vectors):
    def setup(self, stage=None):
        super().setup(stage)
        self.train = Noisy()


class AugmentedByWorkers(Augmented):
    """The same by two persistent workers, with a worker_init_fn."""

    def train_dataloader(self):
        return DataLoader(
            self.train,
            batch_size=8,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            prefetch_factor=4,
            worker_init_fn=seed_worker,
        )


def seed_worker(worker_id: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


class SeededLoader(plain.Vectors):
    """A generator is handed to the loader."""

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        return DataLoader(self.train, batch_size=8, shuffle=True, generator=generator)


class Sharded(IterableDataset):
    """Divides its samples over the loader's workers, and has a length."""

    def __len__(self):
        return 48

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(data.regression, range(first, 48, step))


class ShardedStream(plain.Vectors):
    def train_dataloader(self):
        return DataLoader(Sharded(), batch_size=8)


class ShardedByWorkers(plain.Vectors):
    def train_dataloader(self):
        return DataLoader(Sharded(), batch_size=8, num_workers=2)


class Chained(plain.Vectors):
    def train_dataloader(self):
        return DataLoader(ChainDataset([plain.Lines(0, 24), plain.Lines(50, 74)]), batch_size=8)


class NamedValidations(plain.Vectors):
    """A dict of loaders for validation."""

    def val_dataloader(self):
        return {
            "near": DataLoader(self.val, batch_size=8),
            "far": DataLoader(self.test, batch_size=8),
        }


class CombinedValidation(plain.Vectors):
    """A CombinedLoader for validation, one after the other."""

    def val_dataloader(self):
        loaders = [DataLoader(self.val, batch_size=8), DataLoader(self.test, batch_size=8)]
        return CombinedLoader(loaders, "sequential")


class PairedValidation(plain.Vectors):
    """A CombinedLoader whose batches are pairs of batches."""

    def val_dataloader(self):
        loaders = {
            "a": DataLoader(self.val, batch_size=8),
            "b": DataLoader(self.test, batch_size=8),
        }
        return CombinedLoader(loaders, "max_size_cycle")


class ReadsPairs(Regressor):
    def validation_step(self, batch, batch_idx):
        loss = sum(
            super(ReadsPairs, self).validation_step(part, batch_idx) for part in batch.values()
        )
        self.log("pair", loss, sync_dist=True)


class CombinedTraining(plain.Vectors):
    """A CombinedLoader for training."""

    def train_dataloader(self):
        loaders = [DataLoader(self.train, batch_size=8), DataLoader(self.val, batch_size=8)]
        return CombinedLoader(loaders, "max_size_cycle")


class ListTraining(plain.Vectors):
    """A list of loaders for training."""

    def train_dataloader(self):
        return [DataLoader(self.train, batch_size=8), DataLoader(self.train, batch_size=8)]


class NoValidation(plain.Vectors):
    """val_dataloader returns an empty list."""

    def val_dataloader(self):
        return []


class Prepared(plain.Vectors):
    """prepare_data writes a file, once per machine; setup reads it."""

    def __init__(self, folder: str = "prepared"):
        super().__init__()
        self.prepare_data_per_node = False
        self.folder = folder

    def prepare_data(self):
        from pathlib import Path

        folder = Path(self.folder)
        folder.mkdir(exist_ok=True)
        if not (folder / "x.pt").exists():
            torch.save([data.regression(i) for i in range(48)], folder / f"x.pt.{id(self)}")
            (folder / f"x.pt.{id(self)}").replace(folder / "x.pt")

    def setup(self, stage=None):
        super().setup(stage)
        self.train = torch.load(f"{self.folder}/x.pt")


class Transfers(plain.Vectors):
    """All three transfer hooks, and predict."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return [x + 0.1, y]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x * 2, y

    def predict_dataloader(self):
        return self.test_dataloader()


class LastIsSmall(plain.Vectors):
    """The last batch of an epoch has other samples than the rest: drop_last is false."""

    def setup(self, stage=None):
        super().setup(stage)
        self.train = data.Samples(self.sample, range(46))


class ModuleTransfers(Regressor):
    """The module's own hooks: noise after the transfer from torch's generator, as kornia's
    augmentation.
    """

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.double(), y.double()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        noise = 0.1 * torch.randn(len(x), 1, device=x.device) if self.trainer.training else 0.0
        return x.float() + noise, y.float()


class Iterator(Regressor):
    """training_step takes the iterator of the loader, and moves its batches."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        assert batch[0].device.type == "cpu"  # Lightning does not move it
        x, y = self.trainer.strategy.batch_to_device(batch)
        loss = F.mse_loss(self(x), y)
        self.log("train/mse", loss, on_epoch=True, batch_size=len(x), sync_dist=True)
        return loss


class Keyword(Regressor):
    """Steps with other names and orders of arguments."""

    def training_step(self, batch):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, *args, **kwargs):
        return self.shared_step(batch, "val")


class OfModule(L.LightningDataModule):
    """from_datasets, by hand: nothing but loaders."""

    def train_dataloader(self):
        return DataLoader(data.Samples(data.regression, range(48)), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(data.Samples(data.regression, range(100, 116)), batch_size=8)
