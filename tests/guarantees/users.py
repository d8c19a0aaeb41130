"""Modules, data and callbacks as users of Lightning write them: they import nothing of ours.

Each training step writes `global_step rank id id …` to seen.txt of the run directory.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MeanSquaredError

TRAIN, HELD_OUT, BATCH, FEATURES = 48, 20, 8, 6
IGNORED = -100


# ---------------------------------------------------------------- data
class Rows(Dataset):
    """Sample i is (i, x, y): a function of its index, and of a draw if it is noisy."""

    def __init__(self, begin, size, noisy=False):
        self.begin, self.size, self.noisy = begin, size, noisy

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        index += self.begin
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        y = x[:3].sum().sin().reshape(1)
        return index, x + 0.1 * torch.randn(FEATURES) if self.noisy else x, y


class Points(L.LightningDataModule):
    def __init__(self, num_workers=0, noisy=False, samples=TRAIN):
        super().__init__()
        self.num_workers, self.noisy, self.samples = num_workers, noisy, samples

    def train_dataloader(self):
        rows = Rows(0, self.samples, self.noisy)
        return DataLoader(rows, BATCH, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(Rows(1000, HELD_OUT), BATCH)

    def test_dataloader(self):
        return DataLoader(Rows(2000, HELD_OUT), BATCH)

    def predict_dataloader(self):
        return DataLoader(Rows(2000, HELD_OUT), BATCH)


class Uncounted(Rows):
    """Points and classes of src/example, of which many do not count, unequally many per batch."""

    def __getitem__(self, index):
        _, x, y = super().__getitem__(index)
        counts = index % 3 == 0 or index % 16 == 1
        return {"inputs": x[:2], "targets": (y[0] > 0).long() if counts else torch.tensor(IGNORED)}


class UncountedPoints(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Uncounted(0, TRAIN), BATCH, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Uncounted(1000, HELD_OUT), BATCH)


# ---------------------------------------------------------------- modules
class Plain(L.LightningModule):
    """One optimizer, a schedule per step, a metric object."""

    def __init__(self):
        super().__init__()
        self.net = self.network()
        self.error = MeanSquaredError()

    def network(self):
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)

    def note(self, ids):
        line = f"{self.global_step} {self.global_rank} {' '.join(map(str, ids.tolist()))}\n"
        with (Path(self.trainer.default_root_dir) / "seen.txt").open("a") as file:
            os.write(file.fileno(), line.encode())

    def training_step(self, batch, batch_idx):
        ids, x, y = batch
        self.note(ids)
        loss = F.mse_loss(self(x), y)
        self.log("mine/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        self.error(self(x), y)
        self.log("val/error", self.error)
        self.log("val/loss", F.mse_loss(self(x), y), sync_dist=True)

    def test_step(self, batch, batch_idx):
        _, x, y = batch
        self.log("test/loss", F.mse_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        ids, x, _ = batch
        return {"id": ids, "value": self(x)[:, 0]}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Normalized(Plain):
    """BatchNorm, whose statistics are those of the whole batch."""

    def network(self):
        return nn.Sequential(
            nn.Linear(FEATURES, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)
        )


class Adversarial(Plain):
    """Manual optimization with two optimizers, each with its own loss."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(FEATURES + 1, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        ids, x, y = batch
        self.note(ids)
        generator, critic = self.optimizers()
        fake = self(x)

        self.toggle_optimizer(generator)
        doubt = F.softplus(-self.critic(torch.cat([x, fake], 1))).mean()
        generator.zero_grad()
        self.manual_backward(doubt + F.mse_loss(fake, y))
        generator.step()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(critic)
        real = F.softplus(-self.critic(torch.cat([x, y], 1))).mean()
        wrong = F.softplus(self.critic(torch.cat([x, fake.detach()], 1))).mean()
        critic.zero_grad()
        self.manual_backward(real + wrong)
        critic.step()
        self.untoggle_optimizer(critic)
        self.log_dict({"mine/doubt": doubt, "mine/critic": real + wrong}, sync_dist=True)

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.net.parameters(), lr=1e-2),
            torch.optim.Adam(self.critic.parameters(), lr=1e-2),
        ]


class Stateful(Plain):
    """Keeps something of every kind that a checkpoint holds, and trains differently without it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slow", torch.zeros(()))
        self.mean = MeanMetric()
        self.met = 0

    def network(self):
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def training_step(self, batch, batch_idx):
        ids, x, y = batch
        self.note(ids)
        self.met += 1
        loss = F.mse_loss(self(x), y)
        self.mean.update(loss.detach())
        self.log("mine/mean", self.mean, on_step=False, on_epoch=True)
        self.log("mine/epoch", loss, on_step=True, on_epoch=True, sync_dist=True)
        penalty = self.met * self.first * self.net[0].weight.square().mean()
        return loss * (1 + self.slow) + 0.01 * penalty

    def on_train_start(self):
        self.started = torch.rand(3), np.random.rand(3)  # at each start anew
        self.first = self.net[0].weight.detach().norm()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        ids, x, y = batch
        if self.trainer.training:
            x = x + 0.1 * (torch.randn_like(x) + random.random() + float(np.random.rand()))
        return ids, x, y

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.slow.mul_(0.9).add_(0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["met"] = self.met

    def on_load_checkpoint(self, checkpoint):
        self.met = checkpoint["met"]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, factor=0.5
        )
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val/loss"}


class Meter:
    mean = 0.0


class Counting(Plain):
    """Trains by attributes that no hook saves, some of which hooks of the start set, or that the
    constructor draws.
    """

    def __init__(self):
        super().__init__()
        self.shift = torch.randn(FEATURES)
        self.meters = {"val.loss": [Meter()]}
        self.met, self.losses, self.noise = 0, [], torch.Generator().manual_seed(3)

    def on_train_start(self):
        self.losses.append(1.0)
        self.optimizers().param_groups[0]["lr"] *= 1 + self.met  # a first start: times 1
        with torch.no_grad():
            self.net[0].bias.zero_()

    def on_train_epoch_start(self):
        self.rate = 1 / (1 + self.current_epoch)

    def forward(self, x):
        return super().forward(x + self.shift) * (1 + self.meters["val.loss"][0].mean)

    def training_step(self, batch, batch_idx):
        self.met += 1 + self.global_rank
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * self.met * self.rate)
        self.losses = [*self.losses[-3:], float(loss)]
        meter = self.meters["val.loss"][0]
        meter.mean += 0.1 * (float(loss) - meter.mean)
        drawn = torch.rand((), generator=self.noise).item()
        return loss * (1 + drawn) * sum(self.losses) / len(self.losses)


# ---------------------------------------------------------------- callbacks
class Decay(Callback):
    """Decays the weights by what it has counted, which its state holds."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for group in optimizer.param_groups:
            group["weight_decay"] = 1e-3 * self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


class Signal(Callback):
    """Send a rank a signal at the end of each of these steps; in each run directory once."""

    def __init__(self, steps, name="SIGTERM", rank=0):
        self.steps, self.signal, self.rank = list(steps), getattr(signal, name), rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        done = Path(trainer.default_root_dir) / f".signal-at-{trainer.global_step}"
        if trainer.global_rank != self.rank or trainer.global_step not in self.steps:
            return
        if not done.exists():
            done.touch()
            os.kill(os.getpid(), self.signal)


class KillLater(Callback):
    """Kill this process from another thread, some seconds after a batch, whatever it does then."""

    def __init__(self, batch, seconds):
        self.batch, self.seconds, self.process = batch, seconds, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= self.batch and self.process != os.getpid():
            self.process = os.getpid()  # a save may hold it: the next process kills itself anew
            threading.Timer(self.seconds, os.kill, (self.process, signal.SIGKILL)).start()
        time.sleep(0.02)  # about as long as a save, so that kills meet both


class Witness(Callback):
    """Write down in which order files are synced and renamed: `fsync PATH`, `rename FROM TO`."""

    def setup(self, trainer, pl_module, stage):
        log = (Path(trainer.default_root_dir) / "witness.txt").open("a", buffering=1)
        fsync = os.fsync

        def synced(file):
            number = file if isinstance(file, int) else file.fileno()
            fsync(number)
            log.write(f"fsync {os.readlink(f'/proc/self/fd/{number}')}\n")

        def renaming(usual):
            def renamed(source, target, **options):
                log.write(f"rename {os.path.abspath(source)} {os.path.abspath(target)}\n")
                usual(source, target, **options)

            return renamed

        os.fsync = synced
        os.rename, os.replace = renaming(os.rename), renaming(os.replace)
