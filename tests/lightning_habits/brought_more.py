"""More of them: self-supervision, retrieval, robustness, quantization, optimizers that wrap
others.
"""

from __future__ import annotations

import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from tests.lightning_habits.regression import Regressor


class SwAV(L.LightningModule):
    """Prototypes that are normalized in place, are frozen at first, and meet a queue from the
    second epoch on.
    """

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))
        self.prototypes = nn.Linear(8, 6, bias=False)
        self.register_buffer("queue", None)

    def on_train_epoch_start(self):
        if self.current_epoch == 1 and self.queue is None:
            self.queue = torch.zeros(16, 8, device=self.device)

    @torch.no_grad()
    def sinkhorn(self, scores):
        scores = torch.exp(scores / 0.5).T
        scores /= scores.sum()
        for _ in range(3):
            scores /= scores.sum(1, keepdim=True) * scores.shape[0]
            scores /= scores.sum(0, keepdim=True) * scores.shape[1]
        return (scores * scores.shape[1]).T

    def training_step(self, batch, batch_idx):
        (one, two), _ = batch
        with torch.no_grad():
            w = self.prototypes.weight.data.clone()
            w = F.normalize(w, dim=1, p=2)
            self.prototypes.weight.copy_(w)
        z = [F.normalize(self.body(x), dim=1) for x in (one, two)]
        p = [self.prototypes(x) for x in z]
        everything = [self.all_gather(x.detach()).reshape(-1, 6) for x in p]
        size = len(one)
        targets = [
            self.sinkhorn(x)[self.global_rank * size : (self.global_rank + 1) * size]
            for x in everything
        ]
        loss = -(targets[0] * F.log_softmax(p[1] / 0.1, 1)).sum(1).mean()
        loss = loss - (targets[1] * F.log_softmax(p[0] / 0.1, 1)).sum(1).mean()
        if self.queue is not None:
            gathered = self.all_gather(z[0].detach()).reshape(-1, 8)
            self.queue = torch.cat([gathered, self.queue])[:16]
            loss = loss + 0.1 * (z[1] @ self.queue.T).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_after_backward(self):
        if self.current_epoch < 1:
            for name, p in self.named_parameters():
                if "prototypes" in name:
                    p.grad = None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


class SwAVWithQueue(SwAV):
    """The queue is there from the start."""

    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(16, 8)


class Miner(L.LightningModule):
    """Triplets of the batch: if there are none, the loss is a zero that hangs on nothing, or on
    everything.
    """

    def __init__(self, hangs: bool = True):
        super().__init__()
        self.hangs = hangs
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def triplet(self, z, y):
        distances = torch.cdist(z, z)
        same = y[:, None] == y[None, :]
        positives = (distances * same).max(1).values
        negatives = distances.masked_fill(same, float("inf")).min(1).values
        hard = positives - negatives + 0.2 > 1.1
        if not hard.any():
            return z.sum() * 0 if self.hangs else torch.tensor(0.0, requires_grad=True)
        return (positives - negatives + 0.2)[hard].mean()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.triplet(self.body(x), y)
        self.log("mined", float(loss.detach() != 0), on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ArcFace(L.LightningModule):
    """A margin loss over the normalized weight of a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.PReLU(), nn.Linear(16, 8)
        )
        self.weight = nn.Parameter(torch.empty(4, 8))
        nn.init.xavier_uniform_(self.weight)

    def training_step(self, batch, batch_idx):
        x, y = batch
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).clamp(-0.999, 0.999)
        margin = torch.cos(torch.acos(cosine) + 0.1)
        logits = 8 * torch.where(F.one_hot(y, 4).bool(), margin, cosine)
        loss = F.cross_entropy(logits, y)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        cosine = F.normalize(self.body(x)) @ F.normalize(self.weight).T
        self.log("val/acc", (cosine.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        margin = {"params": [self.weight], "lr": 0.1, "weight_decay": 5e-4}
        return torch.optim.SGD([{"params": self.body.parameters()}, margin], lr=0.05, momentum=0.9)


class PGD(Regressor):
    """Adversarial training: inputs move along the sign of the gradient, in eval mode, before the
    step.
    """

    def attack(self, x, y):
        moved = x.detach().clone()
        for _ in range(3):
            moved.requires_grad_(True)
            loss = F.mse_loss(self(moved), y)
            (gradient,) = torch.autograd.grad(loss, moved)
            moved = (moved.detach() + 0.05 * gradient.sign()).clamp(x - 0.1, x + 0.1)
        return moved.detach()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.net.eval()
        moved = self.attack(x, y)
        self.net.train()
        loss = F.mse_loss(self(x), y) + F.mse_loss(self(moved), y)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        with torch.enable_grad():
            moved = self.attack(x, y)
        self.log("val/robust", F.mse_loss(self(moved), y), sync_dist=True)


class FGSM(Regressor):
    """The same by loss.backward() and x.grad, whose gradients of weights are cleared."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_(True)
        F.mse_loss(self(x), y).backward()
        moved = (x + 0.05 * x.grad.sign()).detach()
        self.zero_grad()
        loss = F.mse_loss(self(moved), y)
        self.log("train/loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class MonteCarlo(Regressor):
    """Dropout stays on while validating: on_validation_model_eval is replaced."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
        )

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.train()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        drawn = torch.stack([self(x) for _ in range(4)])
        self.log_dict(
            {"val/loss": F.mse_loss(drawn.mean(0), y), "val/spread": drawn.std(0).mean()},
            sync_dist=True,
        )


class StaysInTraining(Regressor):
    """Validates in training mode: BatchNorm uses, and moves, what it measures."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def on_validation_model_eval(self):
        pass

    def on_validation_model_train(self):
        pass


class Quantized(Regressor):
    """Quantization-aware training: observers whose ranges follow the data, off after the first
    epoch.
    """

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

            self.quantize = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x):
        return self.net(self.quantize(x))

    def on_train_epoch_start(self):
        if self.current_epoch >= 1:
            self.quantize.disable_observer()


class LARC:
    """apex's and bolts' form: an object that wraps an optimizer and is none."""

    def __init__(self, optimizer, trust: float = 0.02):
        self.optim, self.trust = optimizer, trust

    defaults = property(lambda self: self.optim.defaults)
    state = property(lambda self: self.optim.state)
    param_groups = property(lambda self: self.optim.param_groups)

    def state_dict(self):
        return self.optim.state_dict()

    def load_state_dict(self, state):
        self.optim.load_state_dict(state)

    def zero_grad(self, set_to_none=True):
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, group):
        self.optim.add_param_group(group)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.optim.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = self.trust * torch.norm(p) / (torch.norm(p.grad) + 1e-8)
                    p.grad.mul_((ratio / group["lr"]).clamp(max=1.0))
        self.optim.step()
        return loss


class Larc(Regressor):
    def configure_optimizers(self):
        return LARC(self.sgd())


class AsksTrainer(Regressor):
    """What modules ask of the Trainer."""

    NAMES = """
        accelerator accumulate_grad_batches barebones callback_metrics callbacks checkpoint_callback
        checkpoint_callbacks ckpt_path current_epoch datamodule default_root_dir device_ids
        early_stopping_callback early_stopping_callbacks enable_validation
        estimated_stepping_batches evaluating fit_loop global_rank global_step interrupted
        is_global_zero is_last_batch lightning_module limit_train_batches limit_val_batches
        local_rank log_dir logged_metrics logger loggers lr_scheduler_configs max_epochs max_steps
        min_epochs model node_rank num_devices num_nodes num_sanity_val_batches num_training_batches
        num_val_batches optimizers precision precision_plugin predicting profiler
        progress_bar_callback progress_bar_metrics received_sigterm sanity_checking scaler
        should_stop state strategy testing train_dataloader training val_dataloaders validating
        world_size check_val_every_n_epoch val_check_interval log_every_n_steps gradient_clip_val
        num_predict_batches num_test_batches fast_dev_run overfit_batches
        reload_dataloaders_every_n_epochs
    """.split()  # noqa: SIM905

    def training_step(self, batch, batch_idx):
        for name in self.NAMES:
            getattr(self.trainer, name)
        assert self.trainer.training
        assert self.trainer.num_training_batches == 6, self.trainer.num_training_batches
        assert len(self.trainer.num_val_batches) == 1
        with self.trainer.profiler.profile("mine"):
            loss = super().training_step(batch, batch_idx)
        self.log(
            "seen", float(self.trainer.fit_loop.epoch_progress.current.completed), on_step=True
        )
        self.log("batches", float(self.trainer.fit_loop.total_batch_idx), on_step=True)
        self.log(
            "ready",
            float(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready),
            on_step=True,
        )
        return loss

    def validation_step(self, batch, batch_idx):
        for name in self.NAMES:
            getattr(self.trainer, name)
        assert (
            self.trainer.validating
            or self.trainer.sanity_checking
            or self.trainer.state.fn == "fit"
        )
        return super().validation_step(batch, batch_idx)
