"""Hooks of the Trainer, what they set and what they ask it."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from tests.lightning_habits import data
from tests.lightning_habits.habit import INSIDE, ddp, fsdp, single
from tests.lightning_habits.loaders import Vectors
from tests.lightning_habits.regression import Regressor


class Annealing(Regressor):
    """Weights of the loss by global_step, current_epoch and the Trainer's counts of batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        done = self.global_step / self.trainer.estimated_stepping_batches
        within = batch_idx / self.trainer.num_training_batches
        return loss * (1 + done + within + 0.1 * self.current_epoch)

    def on_train_epoch_end(self):
        self.log("val_of_epoch", self.trainer.callback_metrics["val/loss"])


class SkipsTheRest(Regressor):
    """on_train_batch_start returns -1: the rest of the epoch is left out."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


class OwnCallbacks(Regressor):
    """configure_callbacks."""

    def configure_callbacks(self):
        return [L.pytorch.callbacks.EarlyStopping("val/loss", mode="max", patience=1)]


class Seeds(Regressor):
    """seed_everything in the constructor, and random initial weights by hand."""

    def __init__(self, seed: int = 42):
        L.seed_everything(seed, workers=True)
        super().__init__()
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)


class Printer(Regressor):
    """The logger, printing and the Trainer's attributes."""

    example_input_array = torch.ones(4, 8)

    def on_fit_start(self):
        self.print("module on", self.device, self.dtype, self.global_rank, self.local_rank)
        self.logger.log_hyperparams({"width": 16})
        self.logger.log_metrics({"first": 1.0}, step=0)

    @rank_zero_only
    def show(self):
        assert self.trainer.is_global_zero

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.show()
        assert self.trainer.num_training_batches == 6
        assert self.trainer.is_last_batch == (batch_idx == 5)
        assert float(outputs["loss"]) >= 0
        assert self.lr_schedulers() is None
        self.log("lr_now", self.optimizers().param_groups[0]["lr"])
        self.log("done", float(self.trainer.global_step))

    def on_validation_epoch_end(self):
        assert not self.trainer.sanity_checking
        self.log("val_epoch", float(self.trainer.current_epoch), prog_bar=True)

    def on_train_epoch_end(self):
        assert float(self.trainer.callback_metrics["val_epoch"]) == self.trainer.current_epoch


class StopsItself(Regressor):
    """trainer.should_stop within training_step."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 13:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class SkipsSteps(Regressor):
    """None from training_step now and then."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 1 else loss


class ChangesByEpoch(Vectors):
    """Samples and batches change with attributes that a hook sets by the epoch."""

    class Samples(data.Samples):
        difficulty = 0.0

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + 0.1 * self.difficulty, y

    scale = 1.0

    def setup(self, stage=None):
        super().setup(stage)
        self.train = self.Samples(self.sample, range(48))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * self.scale, batch[1]


class ByEpoch(Regressor):
    """Sets a loss weight, the rate, and attributes of the data module and its dataset."""

    alpha, epochs = 1.0, 0

    def on_train_epoch_start(self):
        self.alpha, self.epochs = 1.0 / (1 + self.current_epoch), self.epochs + 1
        self.log("epochs", float(self.epochs))
        if self.current_epoch:
            self.optimizers().param_groups[0]["lr"] *= 0.5
            self.trainer.datamodule.scale = 2.0
            self.trainer.datamodule.train.difficulty = float(self.current_epoch)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["epochs"] = self.epochs

    def on_load_checkpoint(self, checkpoint):
        self.epochs = checkpoint["epochs"]

    def training_step(self, batch, batch_idx):
        return self.alpha * super().training_step(batch, batch_idx)


class SeedsValidation(Regressor):
    """Noise of the validation from a fixed seed, as diffusion models have it."""

    def on_validation_epoch_start(self):
        torch.manual_seed(0)
        np.random.seed(0)

    def shared_step(self, batch, stage):
        x, y = batch
        noise = torch.randn_like(x) + float(np.random.randn())
        return super().shared_step((x + 0.1 * noise, y), stage)


class Bank(Regressor):
    """Reads the whole training data at each validation, as nearest neighbors do."""

    def on_validation_epoch_end(self):
        loader = self.trainer.datamodule.train_dataloader()
        bank = torch.cat([x for x, _ in loader])
        assert len(bank) == len(self.trainer.datamodule.train)
        self.log("val/bank", bank.double().mean().float())


class Iterator(Regressor):
    """training_step takes the iterator of the loader, and moves its batches."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        assert batch[0].device.type == "cpu"  # Lightning does not move it
        x, y = self.trainer.strategy.batch_to_device(batch)
        loss = F.mse_loss(self(x), y)
        self.log("train/mse", loss, on_epoch=True, batch_size=len(x), sync_dist=True)
        return loss


class LogsHparams(Regressor):
    """TensorBoard's idiom: hyperparameters with metrics that they are compared by."""

    def on_train_start(self):
        self.logger.log_hyperparams(self.hparams, {"hp/loss": 0.0, "hp/rate": 0.0})

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)
        self.log("hp/loss", loss, sync_dist=True)
        self.logger.log_metrics({"by_hand": float(self.current_epoch)}, step=self.global_step)

    def on_train_epoch_end(self):
        experiment = self.logger.experiment
        for name, p in self.named_parameters():
            value = p.full_tensor() if hasattr(p, "full_tensor") else p
            experiment.add_histogram(name, value, self.current_epoch)
        experiment.add_scalars("several", {"a": 1.0, "b": 2.0}, self.global_step)


class Draws(Regressor):
    """Dropout, mixup from torch's generator, and noise from NumPy's."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        mix = torch.rand((), device=x.device) * 0.2
        order = torch.randperm(len(x), device=x.device)
        noise = torch.tensor(np.random.normal(scale=0.01, size=x.shape)).to(x)
        x, y = (1 - mix) * x + mix * x[order] + noise, (1 - mix) * y + mix * y[order]
        return super().training_step((F.dropout(x, 0.1), y), batch_idx)


HABITS = [
    fsdp(Annealing),
    ddp(SkipsTheRest, "trainer.max_epochs=null", "trainer.max_steps=15"),
    fsdp(OwnCallbacks),
    ddp(Seeds),
    ddp(Printer, "logger=tensorboard", "+logger.tensorboard.log_graph=true"),
    fsdp(StopsItself),
    # the ranks have to agree on it
    single(SkipsSteps),
    ddp(ByEpoch, "data.num_workers=1", data=ChangesByEpoch, sample=True, resume=INSIDE),
    fsdp(Draws, random=True, sample=True),
    fsdp(SeedsValidation, random=True),
    fsdp(Bank, "data.num_workers=1", data=Vectors),
    fsdp(Iterator),
    fsdp(LogsHparams, "logger=tensorboard"),
]
