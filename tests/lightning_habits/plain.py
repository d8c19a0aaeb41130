"""LightningDataModules as in Lightning's documents: batch sizes of their own, loaders of their
own.
"""

import lightning as L
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)  # fmt: skip

from tests.lightning_habits import data


class Vectors(L.LightningDataModule):
    """random_split in setup, shuffled training."""

    sample = staticmethod(data.regression)

    def __init__(self, batch_size: int = 8, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def prepare_data(self):
        pass

    def setup(self, stage=None):
        everything = data.Samples(self.sample, range(64))
        self.train, self.val = random_split(
            everything, [48, 16], generator=torch.Generator().manual_seed(42)
        )
        self.test = data.Samples(self.sample, range(200, 216))

    def train_dataloader(self):
        return DataLoader(
            self.train,
            batch_size=self.batch_size,
            num_workers=self.hparams.num_workers,
            shuffle=True,
        )

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)

    def teardown(self, stage=None):
        pass


class Unshuffled(Vectors):
    """drop_last, no shuffling, a number of samples that the batch does not divide."""

    def setup(self, stage=None):
        super().setup(stage)
        self.train = data.Samples(self.sample, range(52))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, drop_last=True)


class Tensors(Vectors):
    """A TensorDataset, TrainOnly of validation: none."""

    def setup(self, stage=None):
        samples = [data.regression(i) for i in range(48)]
        self.train = TensorDataset(
            torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        )

    val_dataloader = None
    test_dataloader = None


class Ragged(Vectors):
    """A collate_fn, two workers."""

    sample = staticmethod(data.ragged)

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=8, shuffle=True, collate_fn=data.pack, num_workers=2
        )

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8, collate_fn=data.pack)


class Weighted(Vectors):
    """WeightedRandomSampler for classes of unequal size."""

    def train_dataloader(self):
        weights = torch.linspace(0.1, 1, 48)
        return DataLoader(self.train, batch_size=8, sampler=WeightedRandomSampler(weights, 48))


class Subset(Vectors):
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=SubsetRandomSampler(range(48)))


class ByBatchSampler(Vectors):
    """A batch sampler of torch."""

    def train_dataloader(self):
        sampler = BatchSampler(RandomSampler(self.train), batch_size=8, drop_last=False)
        return DataLoader(self.train, batch_sampler=sampler)


class Buckets(torch.utils.data.Sampler):
    """Batches of neighbors, in another order each epoch: the usual bucket sampler."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self):
        return self.size // 8

    def __iter__(self):
        for start in torch.randperm(len(self)).tolist():
            yield list(range(8 * start, 8 * start + 8))


class ByBuckets(Vectors):
    def train_dataloader(self):
        return DataLoader(self.train, batch_sampler=Buckets(48))


class Lines(IterableDataset):
    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop

    def __iter__(self):
        return map(data.regression, range(self.start, self.stop))


class Streaming(Vectors):
    """An IterableDataset without a length."""

    def train_dataloader(self):
        return DataLoader(Lines(0, 48), batch_size=8)

    def val_dataloader(self):
        return DataLoader(Lines(100, 116), batch_size=8)


class TwoValidations(Vectors):
    def val_dataloader(self):
        return [DataLoader(self.val, batch_size=8), DataLoader(self.test, batch_size=8)]


class WithState(Vectors):
    """state_dict of the data module, and a batch hook of it."""

    def setup(self, stage=None):
        super().setup(stage)
        self.transferred = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training:
            self.transferred += 1
        return x * (1 + 0.01 * self.transferred), y

    def state_dict(self):
        return {"transferred": self.transferred}

    def load_state_dict(self, state_dict):
        self.transferred = state_dict["transferred"]


class TemplateData(L.LightningDataModule):
    """lightning-hydra-template's MNISTDataModule: divides its batch by the number of processes
    itself.
    """

    def __init__(self, batch_size: int = 8, num_workers: int = 0, pin_memory: bool = False):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = self.data_val = self.data_test = None
        self.batch_size_per_device = batch_size

    def setup(self, stage=None):
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("Batch size is not divisible by the number of devices")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train and not self.data_val and not self.data_test:
            everything = data.Samples(data.regression, range(80))
            self.data_train, self.data_val, self.data_test = random_split(
                dataset=everything,
                lengths=[48, 16, 16],
                generator=torch.Generator().manual_seed(42),
            )

    def loader(self, dataset, shuffle):
        return DataLoader(
            dataset=dataset,
            batch_size=self.batch_size_per_device,
            num_workers=self.hparams.num_workers,
            pin_memory=self.hparams.pin_memory,
            shuffle=shuffle,
        )

    def train_dataloader(self):
        return self.loader(self.data_train, True)

    def val_dataloader(self):
        return self.loader(self.data_val, False)

    def test_dataloader(self):
        return self.loader(self.data_test, False)


class Combined(Vectors):
    """Two training loaders at once, as in semi-supervised learning: a batch is a dict of
    batches.
    """

    def train_dataloader(self):
        return {
            "labeled": DataLoader(self.train, batch_size=8, shuffle=True),
            "unlabeled": DataLoader(data.Samples(self.sample, range(300, 400)), batch_size=8),
        }


class Distributed(Vectors):
    """A DistributedSampler by hand."""

    def train_dataloader(self):
        sampler = torch.utils.data.DistributedSampler(
            self.train,
            num_replicas=self.trainer.world_size,
            rank=self.trainer.global_rank,
            shuffle=True,
        )
        return DataLoader(self.train, batch_size=8, sampler=sampler)


class Curriculum(Vectors):
    """Other samples in each epoch."""

    def train_dataloader(self):
        epoch = self.trainer.current_epoch
        return DataLoader(
            data.Samples(self.sample, range(24 * epoch, 24 * epoch + 48)), batch_size=8
        )


class OneByOne(Vectors):
    """batch_size=None: the dataset serves whole batches."""

    def train_dataloader(self):
        whole = [tuple(torch.stack(part) for part in zip(*samples, strict=True)) for samples in (
            [data.regression(i) for i in range(8 * n, 8 * n + 8)] for n in range(6)
        )]  # fmt: skip
        return DataLoader(whole, batch_size=None)
