"""Steps by other names, nested modules, parametrizations, schedules, and what a step reads."""

from __future__ import annotations

import functools

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torchmetrics import MeanMetric

from tests.lightning_habits.regression import Manual, Regressor


class Histograms(Regressor):
    """Weights and gradients as NumPy arrays."""

    def on_after_backward(self):
        for name, p in self.named_parameters():
            self.log(f"g/{name}", float(p.grad.abs().max()))

    def on_train_epoch_end(self):
        for name, p in self.named_parameters():
            counts, _ = np.histogram(p.detach().cpu().numpy(), bins=4)
            self.log(f"h/{name}", float(counts.max()))
            self.logger.log_metrics({f"m/{name}": p.detach().mean().item()}, step=self.global_step)


class Orthogonal(Regressor):
    """Penalties by matrix products and singular values of the weights."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        w = self.net[0].weight
        loss = loss + 0.01 * (w.T @ w - torch.eye(8, device=w.device)).square().sum()
        return loss + 0.01 * torch.linalg.svdvals(w).max() + 0.01 * w.flatten()[3:9].square().sum()


class PenaltyFirst(Regressor):
    """A penalty by sums and rows of the weights, before the forward; every third loss is it
    alone.
    """

    def training_step(self, batch, batch_idx):
        penalty = (
            sum(p.sum() for p in self.parameters())
            + self.net[0].weight[0].sum()
            + (2 * self.net[2].weight).mean()
        )
        penalty = 0.1 * penalty.square()
        self.log("train/penalty", penalty)
        return penalty if batch_idx % 3 == 2 else super().training_step(batch, batch_idx) + penalty


class Anchored(Regressor):
    """A penalty for the distance from the first weights, which are buffers."""

    def __init__(self):
        super().__init__()
        for name, p in [*self.named_parameters()]:
            self.register_buffer(f"first_{name.replace('.', '_')}", p.detach().clone())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        first = {
            name: getattr(self, f"first_{name.replace('.', '_')}")
            for name, _ in self.named_parameters()
        }
        return loss + 0.1 * sum(
            (p - first[name]).square().sum() for name, p in self.named_parameters()
        )


class CallsForward(Regressor):
    """forward is called by its name, also of layers."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.forward(x), y) + 0.1 * F.mse_loss(self.net.forward(x), y)
        hidden = self.net[0].forward(x)
        loss = loss + 0.01 * hidden.square().mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss


class PartialSteps(Regressor):
    """Steps are partial methods, and one is set in the constructor."""

    def __init__(self):
        super().__init__()
        self.test_step = functools.partial(self.any_step, "test")

    def any_step(self, stage, batch, batch_idx, dataloader_idx=0):
        return self.shared_step(batch, stage)

    training_step = functools.partialmethod(any_step, "train")
    validation_step = functools.partialmethod(any_step, "val")


def timed(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class DecoratedSteps(Regressor):
    """Steps behind a decorator that does not keep their signature."""

    @timed
    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    @timed
    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")


class Child(L.LightningModule):
    """A LightningModule that is trained on its own elsewhere."""

    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scale = (
            1
            + 0.1 * self.current_epoch
            + 0.01 * self.global_step / self.trainer.estimated_stepping_batches
        )
        loss = scale * F.mse_loss(self(x), y)
        self.log("child/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Parent(L.LightningModule):
    """Calls its children's steps, lends them its log, and joins their optimizers' groups."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Child(), Child(8)
        for child in (self.first, self.second):
            object.__setattr__(child, "log", self.log)

    def training_step(self, batch, batch_idx):
        return self.first.training_step(batch, batch_idx) + self.second.training_step(
            batch, batch_idx
        )

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.mse_loss(self.first(x) + self.second(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizers = [child.configure_optimizers() for child in (self.first, self.second)]
        return torch.optim.SGD([group for o in optimizers for group in o.param_groups], lr=0.05)


class ChosenManual(Manual):
    """Manual or automatic, by an argument."""

    def __init__(self, manual: bool = True):
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.shared_step(batch, "train")
        return super().training_step(batch, batch_idx)


class Sharded(Regressor):
    """The hook of Lightning 1."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_sharded_model(self):
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class FineSchedules(Regressor):
    """Three schedules of one optimizer, with names, intervals, frequencies and monitors of their
    own.
    """

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            [
                {"params": self.net[0].parameters()},
                {"params": self.net[2].parameters(), "lr": 0.02},
            ],
            lr=0.05,
            momentum=0.8,
        )
        warmup = lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (1 + 0.02 * s), lambda s: 0.99**s])
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max", factor=0.7)
        step = lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=1, factor=0.9, min_lr=[1e-3, 1e-4]
        )
        return [optimizer], [
            {"scheduler": warmup, "interval": "step", "frequency": 2, "name": "warm"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val/loss", "strict": True},
            {
                "scheduler": step,
                "interval": "step",
                "frequency": 3,
                "monitor": "train/mse",
                "reduce_on_plateau": True,
            },
        ]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train/mse", loss, sync_dist=True)
        return loss


class OldSpectral(Regressor):
    """torch.nn.utils.spectral_norm, by hooks, twice per step and in eval."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(8, 16)),
            nn.Tanh(),
            nn.utils.spectral_norm(nn.Linear(16, 1)),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y) + 0.1 * F.mse_loss(self(-x), -y)
        self.log("train/loss", loss, sync_dist=True)
        return loss


class CachedParametrization(Regressor):
    """parametrize.cached around the step, with an orthogonal and a normalized weight."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.net[0])
        nn.utils.parametrizations.weight_norm(self.net[2])

    def training_step(self, batch, batch_idx):
        with nn.utils.parametrize.cached():
            x, y = batch
            loss = F.mse_loss(self(x), y) + 0.1 * F.mse_loss(self(-x), -y)
        self.log("train/loss", loss, sync_dist=True)
        return loss


class TokenMeans(Regressor):
    """Means by numbers that differ between batches and ranks."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        keep = x[:, 0] > -0.5
        if not keep.any():
            keep[0] = True
        error = (self(x) - y).square()[:, 0]
        self.log(
            "kept",
            error[keep].mean(),
            batch_size=int(keep.sum()),
            on_epoch=True,
            on_step=False,
            sync_dist=True,
        )
        self.log("most", error.max(), reduce_fx="max", on_epoch=True, on_step=False, sync_dist=True)
        self.log(
            "sum", error.sum(), reduce_fx=torch.sum, on_epoch=True, on_step=False, sync_dist=True
        )
        return error.mean()


class MetricInLoss(Regressor):
    """A metric that is never reset scales the loss."""

    def __init__(self):
        super().__init__()
        self.scale = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.scale.update(loss.detach())
        return loss / self.scale.compute()


class ReadsCallbackMetrics(Regressor):
    """What was logged decides the loss: of the validation before, and of the step before."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("rate", 0.5 + 0.1 * self.global_step)
        weight = 1 + self.trainer.callback_metrics.get("val/loss", torch.tensor(1.0))
        return weight * loss * (1 + self.trainer.callback_metrics.get("rate", torch.tensor(0.0)))


class SeedsValidation(Regressor):
    """Noise of the validation from a fixed seed, as diffusion models have it."""

    def on_validation_epoch_start(self):
        torch.manual_seed(0)
        np.random.seed(0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step(
            (x + 0.1 * torch.randn_like(x) + 0.01 * float(np.random.randn()), y), batch_idx
        )

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return super().validation_step((x + 0.1 * torch.randn_like(x), y), batch_idx)
