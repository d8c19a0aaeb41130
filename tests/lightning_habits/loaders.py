"""LightningDataModules: loaders, samplers, batches and streams."""

import random
from typing import Any

import lightning as L
import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from tests.lightning_habits import data
from tests.lightning_habits.habit import ddp, fsdp
from tests.lightning_habits.regression import Regressor


class Vectors(L.LightningDataModule):
    """random_split in setup, shuffled training."""

    sample = staticmethod(data.regression)

    def __init__(self, batch_size: int = 8, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def setup(self, stage=None):
        everything = data.Samples(self.sample, range(64))
        generator = torch.Generator().manual_seed(42)
        self.train, self.val = random_split(everything, [0.75, 0.25], generator=generator)
        self.test = data.Samples(self.sample, range(200, 216))

    def train_dataloader(self):
        workers = self.hparams.num_workers
        return DataLoader(self.train, self.batch_size, num_workers=workers, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


class TwoLoaders(Regressor):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("val/loss", loss, sync_dist=True)
        self.log(f"own/{dataloader_idx}", loss, add_dataloader_idx=False, sync_dist=True)


class TwoValidations(Vectors):
    def val_dataloader(self):
        return [super().val_dataloader(), super().test_dataloader()]


class WithState(Vectors):
    """state_dict of the data module, and a batch hook of it."""

    transferred = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        self.transferred += self.trainer.training
        return x * (1 + 0.01 * self.transferred), y

    def state_dict(self):
        return {"transferred": self.transferred}

    def load_state_dict(self, state_dict):
        self.transferred = state_dict["transferred"]


class TemplateData(Vectors):
    """lightning-hydra-template's MNISTDataModule divides its batch by the number of processes."""

    def setup(self, stage=None):
        super().setup(stage)
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("Batch size is not divisible by the number of devices")
            self.batch_size = self.hparams.batch_size // self.trainer.world_size


class Distributed(Vectors):
    """A DistributedSampler by hand."""

    def train_dataloader(self):
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.train, num_replicas=ranks, rank=rank, shuffle=True)
        return DataLoader(self.train, batch_size=8, sampler=sampler)


def mixed(samples: list[Any]) -> dict[str, Any]:
    ys = torch.stack([y for _, y in samples])
    names = ["a"] * len(samples)
    return {"x": [x for x, _ in samples], "deep": ({"y": ys}, None), "none": None, "names": names}


class Collated(Vectors):
    """Its loaders share a collate_fn."""

    collate = staticmethod(mixed)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8, collate_fn=self.collate)


class FromDict(Regressor):
    """Reads dicts, in which some entries are None, strings or lists."""

    def shared_step(self, batch, stage):
        assert batch["none"] is None
        assert isinstance(batch["names"][0], str)
        return super().shared_step((torch.stack(batch["x"]), batch["deep"][0]["y"]), stage)


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


class FromFields(Regressor):
    """Reads batches by the names x and y."""

    def shared_step(self, batch, stage):
        loss = F.mse_loss(self(batch.x), batch.y)
        self.log(f"{stage}/loss", loss, batch_size=len(batch.x), sync_dist=True)
        return loss


class Noisy(data.Samples):
    """Augmentation from the global generators of torch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = torch.randn(8) + float(np.random.rand()) + random.random()
        return x + 0.01 * noise, y


class Augmented(Vectors):
    """Two persistent workers draw, with a worker_init_fn."""

    def setup(self, stage=None):
        super().setup(stage)
        self.train = Noisy(self.sample, range(48))

    def train_dataloader(self):
        workers = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
        return DataLoader(self.train, 8, shuffle=True, worker_init_fn=seed_worker, **workers)


def seed_worker(worker_id: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


class SeededLoader(Vectors):
    """A generator is handed to the loader."""

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        return DataLoader(self.train, batch_size=8, shuffle=True, generator=generator)


class Transfers(Vectors):
    """All three transfer hooks."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.1, batch[1]]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]


class LastIsSmall(Vectors):
    """The last batch of an epoch has other samples than the rest: drop_last is false."""

    def setup(self, stage=None):
        super().setup(stage)
        self.train = data.Samples(self.sample, range(46))


class ModuleTransfers(Regressor):
    """The module's hooks: noise after the transfer by torch's generator, as kornia's."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0].double(), batch[1].double()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        noise = 0.1 * torch.randn(len(x), 1, device=x.device) if self.trainer.training else 0.0
        return x.float() + noise, y.float()


class SetEpochSampler(Vectors):
    """A sampler with set_epoch, which Lightning calls."""

    class ByEpoch(Sampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 48

        def __iter__(self):
            generator = torch.Generator().manual_seed(self.epoch)
            return iter(torch.randperm(48, generator=generator).tolist())

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=self.ByEpoch())


class Episodes(Sampler):
    """Few-shot learning: a batch sampler, which draws from NumPy's global numbers."""

    def __len__(self):
        return 6

    def __iter__(self):
        for _ in range(6):
            classes = np.random.choice(4, 2, replace=False)
            yield [int(4 * i + c) for c in classes for i in np.random.choice(12, 4, replace=False)]


class EpisodeData(Vectors):
    def train_dataloader(self):
        return DataLoader(self.train, batch_sampler=Episodes())


class OtherName(pl.LightningModule):
    """Names Lightning by its other package, as code of its first years does."""

    def __init__(self, **kwargs):
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/mse", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Streaming(Vectors):
    """An IterableDataset without a length."""

    class Lines(IterableDataset):
        def __iter__(self):
            return map(data.regression, range(48))

    def train_dataloader(self):
        return DataLoader(self.Lines(), batch_size=8)


class Sharded(IterableDataset):
    """Divides its samples over the loader's workers, and has a length."""

    def __len__(self):
        return 48

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(data.regression, range(first, 48, step))


class ShardedByWorkers(Vectors):
    def train_dataloader(self):
        return DataLoader(Sharded(), batch_size=8, num_workers=2)


class BufferShuffled(IterableDataset):
    """webdataset's shuffle: a buffer, and Python's global random numbers."""

    def __iter__(self):
        buffer = []
        for index in range(60):
            buffer.append(index % 48)
            if len(buffer) > 12:
                yield data.regression(buffer.pop(random.randrange(len(buffer))))


class ShuffledStream(Vectors):
    def train_dataloader(self):
        return DataLoader(BufferShuffled(), batch_size=8)


class HardExamples(Vectors):
    """Weights of a sampler, which the module changes while training."""

    def setup(self, stage=None):
        super().setup(stage)
        self.weights = torch.ones(48, dtype=torch.double)

    def train_dataloader(self):
        return DataLoader(self.train, 8, sampler=WeightedRandomSampler(self.weights, 48))

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights.copy_(state["weights"])


class SetsWeightsInside(Regressor):
    """The weights follow what has been learned so far, in the middle of an epoch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            weights = torch.linspace(0.1, 1 + self.trainer.global_step, 48)
            self.trainer.datamodule.weights.copy_(weights)


HABITS = [
    fsdp(TwoLoaders, data=TwoValidations),
    ddp(data=Vectors, sample=True),
    ddp(data=Distributed),
    ddp(FromDict, data=Collated),
    ddp(data=WithState, twice=True),
    fsdp(data=TemplateData),
    ddp(data=SeededLoader),
    ddp(data=Transfers),
    fsdp(FromFields, data=OwnBatches),
    fsdp(data=Augmented),
    ddp(data=SetEpochSampler),
    fsdp(data=EpisodeData),
    fsdp(data=LastIsSmall),
    ddp(ModuleTransfers, random=True),
    fsdp(data=ShardedByWorkers),
    ddp(data=ShuffledStream),
    fsdp(OtherName),
    ddp(data=Streaming, sample=True, twice=True),
    ddp(SetsWeightsInside, data=HardExamples, sample=True, twice=True),
]
