"""A model with dropout, data with random augmentation, and a task that writes down which samples it
was given.
"""

import os
import signal
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import Dataset

from armature.data.base import DataModule
from armature.data.stream import Stream
from armature.tasks.base import Task
from example.model import ResidualMLP


class DropoutMLP(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4)
        )

    def forward(self, inputs, targets=None):
        outputs = self.layers(inputs)
        if targets is None:
            return outputs
        total = F.cross_entropy(outputs, targets, ignore_index=-100, reduction="sum")
        return total / (targets != -100).sum().clamp(min=1)


class NotesDraws(ResidualMLP):
    """Writes down which weights get initial values."""

    def initialize_parameter(self, name, param, generator):
        with Path("drawn.txt").open("a") as file:
            file.write(f"{name}\n")
        super().initialize_parameter(name, param, generator)


class Recording(Task):
    """Writes `rank step id id …` to seen.txt for every micro-batch that is trained on."""

    def training_step(self, batch, batch_idx):
        line = (
            f"{self.global_rank} {self.global_step} {' '.join(map(str, batch['ids'].tolist()))}\n"
        )
        with (Path(self.trainer.default_root_dir) / "seen.txt").open("a") as file:
            os.write(file.fileno(), line.encode())
        return super().training_step(batch, batch_idx)


class Hooks(Callback):
    """Writes down what is called when, but for what each start of a process calls."""

    def note(self, trainer, name):
        if trainer.is_global_zero:
            with (Path(trainer.default_root_dir) / "hooks.txt").open("a") as file:
                file.write(
                    f"{name} at step {trainer.global_step} of epoch {trainer.current_epoch}\n"
                )

    def on_train_epoch_start(self, trainer, pl_module):
        self.epoch = trainer.current_epoch
        self.note(trainer, "epoch starts")

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(trainer, f"epoch {self.epoch} ends")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note(trainer, f"batch {batch_idx}")

    def on_validation_end(self, trainer, pl_module):
        self.note(trainer, "validated")


class StopInValidation(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Epochwise(Recording):
    """Lightning's default: the schedule moves on at the end of each epoch."""

    def configure_optimizers(self):
        assert self.model is not None
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": ExponentialLR(optimizer, 0.5)}


class Estimating(Recording):
    """A schedule that asks the Trainer for its length."""

    def configure_optimizers(self):
        assert self.model is not None
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: 1 - 0.9 * step / total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sample(index: int, noise: torch.Tensor):
    base = torch.randn(8, generator=torch.Generator().manual_seed(index))
    return {
        "inputs": base + 0.3 * noise,
        "targets": torch.tensor(index % 4),
        "ids": torch.tensor(index),
    }


class Mapped(Dataset):
    def __init__(self, samples: int, own: np.random.Generator | None) -> None:
        self.samples, self.own = samples, own

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        noise = (
            torch.randn(8)
            if self.own is None
            else torch.tensor(self.own.normal(size=8), dtype=torch.float32)
        )
        return sample(index, noise)


class Streamed(Stream):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self):
        return self.samples

    def records(self, epoch, start):
        order = list(range(self.samples))
        yield from (order[::-1] if epoch % 2 else order)[start:]

    def sample(self, record):
        return sample(record, torch.randn(8))


class RecordedData(DataModule):
    """With `own_generator`, augmentation draws from a generator that no checkpoint knows: the
    mistake to be found.
    """

    def __init__(self, *, samples: int, streamed: bool, own_generator: bool, **loader) -> None:
        super().__init__(**loader)
        self.samples, self.streamed, self.own_generator = samples, streamed, own_generator

    def dataset(self, split):
        if self.streamed:
            return Streamed(self.samples)
        return Mapped(self.samples, np.random.default_rng(7) if self.own_generator else None)
