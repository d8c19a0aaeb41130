"""Data that depend on what was served or learned before: stateful samplers, streams that count,
replay.
"""

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.lightning_habits import data
from tests.lightning_habits.plain import Vectors
from tests.lightning_habits.regression import Regressor


class Ordered(Sampler):
    """An order of its own, from a generator that draws on from epoch to epoch."""

    def __init__(self, size: int):
        self.size, self.rng = size, np.random.default_rng(7)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(self.rng.permutation(self.size).tolist())


class StatefulSampler(Vectors):
    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=Ordered(48))


class CountingSampler(Vectors):
    """The sampler counts the epochs that it has served."""

    class Counting(Sampler):
        def __init__(self, size: int):
            self.size, self.epoch = size, 0

        def __len__(self):
            return self.size

        def __iter__(self):
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
            self.epoch += 1
            return iter(order.tolist())

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=self.Counting(48))


class SetEpochSampler(Vectors):
    """The same by set_epoch, which Lightning calls."""

    class ByEpoch(Sampler):
        def __init__(self, size: int):
            self.size, self.epoch = size, 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return self.size

        def __iter__(self):
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
            return iter(order.tolist())

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, sampler=self.ByEpoch(48))


class CountingStream(Vectors):
    """A stream whose order depends on how often it was begun."""

    class Stream(IterableDataset):
        def __init__(self):
            self.epoch = 0

        def __iter__(self):
            order = torch.randperm(48, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            self.epoch += 1
            return map(data.regression, order)

    def train_dataloader(self):
        return DataLoader(self.Stream(), batch_size=8)


class Replay(Vectors):
    """A dataset over a buffer that the module fills while training; the data module keeps it."""

    class Memory(torch.utils.data.Dataset):
        def __init__(self):
            self.items = [data.regression(i) for i in range(48)]

        def __len__(self):
            return len(self.items)

        def __getitem__(self, index):
            return self.items[index]

    def setup(self, stage=None):
        super().setup(stage)
        self.train = self.Memory()

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def state_dict(self):
        return {
            "x": torch.stack([x for x, _ in self.train.items]),
            "y": torch.stack([y for _, y in self.train.items]),
        }

    def load_state_dict(self, state):
        self.train.items = list(zip(state["x"], state["y"], strict=True))


class Replays(Regressor):
    """Writes what it has predicted into the memory that the loader reads."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = super().training_step(batch, batch_idx)
        x, y = self.all_gather(x).reshape(-1, 8).cpu(), self.all_gather(y).reshape(-1, 1).cpu()
        items = self.trainer.datamodule.train.items
        for i in range(len(items)):
            old_x, old_y = items[i]
            items[i] = (0.99 * old_x + 0.01 * x.mean(0), 0.99 * old_y + 0.01 * y.mean(0))
        return loss


class ReplayStream(Replay):
    """The same by an IterableDataset, as reinforcement learning has it."""

    class Stream(IterableDataset):
        def __init__(self, memory):
            self.memory = memory

        def __iter__(self):
            for index in torch.randperm(48, generator=torch.Generator().manual_seed(3)).tolist():
                yield self.memory[index]

    def train_dataloader(self):
        return DataLoader(self.Stream(self.train), batch_size=8)


class HardExamples(Vectors):
    """Weights of a sampler that the module changes at the end of each epoch."""

    def setup(self, stage=None):
        super().setup(stage)
        self.weights = torch.ones(48, dtype=torch.double)

    def train_dataloader(self):
        return DataLoader(
            self.train,
            batch_size=8,
            sampler=torch.utils.data.WeightedRandomSampler(self.weights, 48),
        )

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights.copy_(state["weights"])


class SetsWeights(Regressor):
    def on_train_epoch_end(self):
        self.trainer.datamodule.weights.copy_(torch.linspace(0.1, 1 + self.current_epoch, 48))


class SetsWeightsInside(Regressor):
    """Hard examples: the weights follow what has been learned so far, in the middle of an epoch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.datamodule.weights.copy_(
                torch.linspace(0.1, 1 + self.trainer.global_step, 48)
            )


class SetsOwnWeights(Regressor):
    """The weights follow what this rank has seen alone."""

    def on_train_epoch_end(self):
        self.trainer.datamodule.weights.copy_(torch.linspace(0.1, 1 + self.global_rank, 48))


class UnevenHardExamples(HardExamples):
    """Steps that take samples of two epochs."""

    def train_dataloader(self):
        return DataLoader(
            self.train,
            batch_size=8,
            sampler=torch.utils.data.WeightedRandomSampler(self.weights, 44),
        )


class SetsSamplerWeights(Regressor):
    """The same through the Trainer's loader."""

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.sampler.weights = torch.linspace(
            0.1, 1 + self.current_epoch, 48
        ).double()


class LoaderAttributes(Regressor):
    """What modules ask of the loader and the loops."""

    def on_train_start(self):
        loader = self.trainer.train_dataloader
        self.mean = torch.stack([loader.dataset[i][0] for i in range(len(loader.dataset))]).mean(0)
        self.log("batches", float(len(loader)))
        self.log("samples_all", float(len(loader.dataset)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loop = self.trainer.fit_loop
        self.log("loop_batches", float(loop.epoch_loop.total_batch_idx))
        self.log("loop_epoch", float(loop.epoch_progress.current.completed))
        self.log("batches_ready", float(loop.epoch_loop.batch_progress.current.ready))
        return super().training_step((x - self.mean.to(x), y), batch_idx)
