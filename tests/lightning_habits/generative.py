"""Adversarial networks, autoencoders and diffusion."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from tests.lightning_habits.habit import NO_CLIP, SAVED, ddp, fsdp


class GAN(L.LightningModule):
    """Lightning's basic_gan: two optimizers, toggled."""

    def __init__(self, latent: int = 4, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 16), nn.LeakyReLU(0.2), nn.Linear(16, 64))
        self.discriminator = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, imgs):
        """The noise is a part of the images, so that every layout feeds the generator the same."""
        return self.generator(imgs.flatten(1)[:, : self.hparams.latent])

    def loss(self, imgs, real):
        score = self.discriminator(imgs.flatten(1))
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(real)))

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        self.toggle_optimizer(optimizer_g)
        g_loss = self.loss(self(imgs), True)
        self.log("g_loss", g_loss, prog_bar=True, sync_dist=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        d_loss = (self.loss(imgs, True) + self.loss(self(imgs).detach(), False)) / 2
        self.log("d_loss", d_loss, prog_bar=True, sync_dist=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


class ScheduledGAN(GAN):
    """One schedule per optimizer, stepped per batch and per epoch by hand."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch)
        sch_g, sch_d = self.lr_schedulers()
        sch_g.step()
        if self.trainer.is_last_batch:
            sch_d.step()

    def configure_optimizers(self):
        (opt_g, opt_d), _ = super().configure_optimizers()
        sch_g = torch.optim.lr_scheduler.LambdaLR(opt_g, lambda step: 0.98**step)
        sch_d = torch.optim.lr_scheduler.StepLR(opt_d, step_size=1, gamma=0.5)
        return [opt_g, opt_d], [sch_g, sch_d]


class WGAN(GAN):
    """Several steps of the critic per step of the generator, with clipped weights."""

    def training_step(self, batch, batch_idx):
        imgs, _ = batch
        opt_g, opt_c = self.optimizers()
        score = self.discriminator(self(imgs)).mean()
        if batch_idx % 3 == 2:
            self.toggle_optimizer(opt_g)
            opt_g.zero_grad()
            self.manual_backward(-score)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("g_loss", -score, sync_dist=True)
            return
        opt_c.zero_grad()
        self.manual_backward(score - self.discriminator(imgs.flatten(1)).mean())
        opt_c.step()
        with torch.no_grad():
            for p in self.discriminator.parameters():
                p.clamp_(-0.1, 0.1)


class LitAutoEncoder(L.LightningModule):
    """Lightning's first page: values without sync_dist, no validation."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Diffusion(L.LightningModule):
    """Noise and times are drawn in each step; schedule in buffers, an embedding of times."""

    def __init__(self, steps: int = 10):
        super().__init__()
        betas = torch.linspace(1e-3, 0.2, steps)
        self.register_buffer("alphas", (1 - betas).cumprod(0), persistent=False)
        self.time = nn.Embedding(steps, 16)
        self.net = nn.Sequential(nn.Linear(80, 16), nn.SiLU(), nn.Linear(16, 64))

    def loss(self, batch):
        x = batch[0].flatten(1)
        t = torch.randint(0, len(self.alphas), (len(x),), device=self.device)
        noise, a = torch.randn_like(x), self.alphas[t].unsqueeze(1)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, self.time(t)], dim=1)), noise)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


HABITS = [
    ddp(GAN, NO_CLIP, data="images", sample=True, resume=SAVED),
    fsdp(ScheduledGAN, NO_CLIP, data="images"),
    ddp(WGAN, NO_CLIP, data="images"),
    ddp(LitAutoEncoder, data="images", apart=("train_loss",)),
    fsdp(Diffusion, data="images", random=True, sample=True),
]
