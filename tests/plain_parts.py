"""Modules, data and callbacks as people write them for Lightning."""

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.tensor((i * 7) % 16), torch.tensor((i * 5) % 4)


class Data(L.LightningDataModule):
    def __init__(self, count=16, held_out=6, batch_size=2, fold=None):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(Pairs(self.hparams.count), batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(Pairs(self.hparams.held_out), 2)

    test_dataloader = predict_dataloader = val_dataloader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first = nn.Linear(1, 8)
        self.head = nn.Linear(8, 4)
        self.temperature = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        column = x[:, None].float() / 16
        return self.head(torch.tanh(self.embedding(x) + self.first(column))) * self.temperature


def embedding(net, x):
    return net.embedding(x).mean(1)


def bare_weight(net, x):
    return F.linear(x[:, None].float() / 16, net.first.weight).mean(1)


def number(net, x):
    return net.temperature * x.float().mean()


USES = {"embedding": embedding, "bare_weight": bare_weight, "number": number}


class Apart(L.LightningModule):
    """Uses weights of its network outside of the network's forward, in steps and hooks."""

    def __init__(self, use="embedding"):
        super().__init__()
        self.net, self.teacher = Net(), Net()
        self.teacher.requires_grad_(False)
        self.use = USES[use]

    def training_step(self, batch, batch_idx):
        x, y = batch
        apart = self.use(self.net, x).mean()
        with torch.no_grad():
            target = self.use(self.teacher, x).mean()
        return F.cross_entropy(self.net(x), y) + 0.1 * apart + 0.01 * target

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("hook", self.use(self.net, batch[0]).mean().detach(), sync_dist=True)
        with torch.no_grad():
            own = self.use(self.net, batch[0]).mean()
        self.log("without_gradients", own, sync_dist=True)
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.cross_entropy(self.net(x), y), sync_dist=True)
        self.log("val/apart", self.use(self.net, x).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Line(L.LightningModule):
    """A line through points, with an optimizer and a schedule of its own."""

    def __init__(self, lr=0.1, weight_decay=0.0, betas=(0.9, 0.999), gamma=1.0, kind="adam"):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(1, 1)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x[:, None].float() / 16)[:, 0], y.float())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True)
        self.log("val/weight", self.net.weight.sum(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return {"x": batch[0], "y": self.net(batch[0][:, None].float() / 16)[:, 0]}

    def on_train_epoch_end(self):
        self.ended = self.current_epoch + 1.0
        self.log("epochs_ended", self.ended)

    def configure_optimizers(self):
        given = self.hparams
        groups = [
            {"params": [self.net.weight], "weight_decay": given.weight_decay},
            {"params": [self.net.bias], "weight_decay": 0.0},
        ]
        if given.kind == "sgd":
            optimizer = torch.optim.SGD(groups, lr=given.lr)
        else:
            optimizer = torch.optim.Adam(groups, lr=given.lr, betas=tuple(given.betas))
        kinds = torch.optim.lr_scheduler
        schedule = (
            kinds.StepLR(optimizer, 1, given.gamma) if given.gamma else kinds.ConstantLR(optimizer)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Writer(BasePredictionWriter):
    """Each process writes its predictions and the places of their samples."""

    def __init__(self, folder, write_interval="epoch"):
        super().__init__(write_interval)
        self.folder, self.batches = Path(folder), 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]

    def on_train_batch_end(self, *args):
        self.batches += 1

    def note(self, trainer, what):
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"hooks{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{what} after {self.batches} batches\n")

    def on_predict_start(self, trainer, pl_module):
        self.note(trainer, f"predict {trainer.global_rank} of {trainer.world_size}")

    def on_test_end(self, trainer, pl_module):
        self.note(trainer, "test")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.training:
            self.note(trainer, f"validation in {trainer.state.fn}")

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.note(trainer, "predicted")
        found = {"predictions": predictions, "places": batch_indices}
        torch.save(found, self.folder / f"rank{trainer.global_rank}.pt")


class SetDecay(L.Callback):
    """Sets the weight decay of the first group after a step."""

    def __init__(self, step, value):
        self.step, self.value = step, value

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.optimizers[0].param_groups[0]["weight_decay"] = self.value


class Stopping(L.Callback):
    """Ends the training after `patience` steps since the first, a setting that it saves."""

    def __init__(self, patience):
        self.patience, self.waited = patience, 0

    def state_dict(self):
        return {"patience": self.patience, "waited": self.waited}

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)

    def on_train_batch_end(self, trainer, *args):
        self.waited += 1
        trainer.should_stop = self.waited >= self.patience
