"""Gradients of inputs and samples, and gradients that are changed before a step."""

import torch
import torch.nn.functional as F

from tests.lightning_habits.habit import ddp, fsdp
from tests.lightning_habits.regression import Regressor


class Penalty(Regressor):
    """A second derivative: the gradient penalty of the inputs."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_()
        out = self(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * grad.square().sum(1).mean()


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


class OwnClipping(Regressor):
    """configure_gradient_clipping by epoch."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        value = 0.1 if self.current_epoch else 0.5
        self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")


HABITS = [
    # fsdp has no gradient of a gradient
    ddp(Penalty, sample=True),
    fsdp(PGD),
    fsdp(OwnClipping),
]
