"""Adversarial networks and autoencoders, as in Lightning's examples."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class GAN(L.LightningModule):
    """Lightning's basic_gan: two optimizers, toggled."""

    def __init__(self, latent: int = 4, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = mlp(latent, 16, 64)
        self.discriminator = mlp(64, 16, 1)
        self.register_buffer("validation_z", torch.linspace(-1, 1, 4 * latent).reshape(4, latent))

    def forward(self, z):
        return self.generator(z).view(-1, 1, 8, 8)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def noise(self, imgs):
        """Of the images, so that every layout feeds the generator the same."""
        return imgs.flatten(1)[:, : self.hparams.latent]

    def discriminate(self, imgs):
        return self.discriminator(imgs.flatten(1))

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = self.noise(imgs)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminate(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True, sync_dist=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminate(imgs), valid)
        fake_loss = self.adversarial_loss(
            self.discriminate(self(z).detach()), torch.zeros_like(valid)
        )
        d_loss = (real_loss + fake_loss) / 2
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


class UntoggledGAN(GAN):
    """As in Lightning's page on manual optimization: the generator's step leaves gradients in the
    discriminator.
    """

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        X, _ = batch
        g_X = self(self.noise(X))
        ones, zeros = (
            torch.ones(len(X), 1, device=self.device),
            torch.zeros(len(X), 1, device=self.device),
        )
        errD_real = self.adversarial_loss(self.discriminate(X), ones)
        errD_fake = self.adversarial_loss(self.discriminate(g_X.detach()), zeros)
        errD = errD_real + errD_fake
        d_opt.zero_grad()
        self.manual_backward(errD)
        d_opt.step()
        errG = self.adversarial_loss(self.discriminate(g_X), ones)
        g_opt.zero_grad()
        self.manual_backward(errG)
        g_opt.step()
        self.log_dict({"g_loss": errG, "d_loss": errD}, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=2e-3)
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3)
        return g_opt, d_opt


class ScheduledGAN(GAN):
    """One schedule per optimizer, stepped per batch and per epoch by hand; losses over the
    epoch.
    """

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

    def on_train_epoch_end(self):
        self.log("epochs_done", float(self.current_epoch + 1))


class WGAN(GAN):
    """Five steps of the critic per step of the generator, with clipped weights."""

    critic_steps = 5

    def training_step(self, batch, batch_idx):
        imgs, _ = batch
        opt_g, opt_c = self.optimizers()
        z = self.noise(imgs)
        if batch_idx % (self.critic_steps + 1) == self.critic_steps:
            self.toggle_optimizer(opt_g)
            loss = -self.discriminate(self(z)).mean()
            opt_g.zero_grad()
            self.manual_backward(loss)
            opt_g.step()
            self.untoggle_optimizer(opt_g)
            self.log("g_loss", loss, sync_dist=True)
            return
        self.toggle_optimizer(opt_c)
        loss = self.discriminate(self(z).detach()).mean() - self.discriminate(imgs).mean()
        opt_c.zero_grad()
        self.manual_backward(loss)
        opt_c.step()
        with torch.no_grad():
            for p in self.discriminator.parameters():
                p.clamp_(-0.1, 0.1)
        self.untoggle_optimizer(opt_c)
        self.log("c_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        opt_g = torch.optim.RMSprop(self.generator.parameters(), lr=1e-3)
        opt_c = torch.optim.RMSprop(self.discriminator.parameters(), lr=1e-3)
        return opt_g, opt_c


class InnerCritic(GAN):
    """Several steps of the critic within one training_step."""

    def training_step(self, batch, batch_idx):
        imgs, _ = batch
        opt_g, opt_c = self.optimizers()
        z = self.noise(imgs)
        for _ in range(3):
            loss = self.discriminate(self(z).detach()).mean() - self.discriminate(imgs).mean()
            opt_c.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(opt_c, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            opt_c.step()
        opt_g.zero_grad()
        self.manual_backward(-self.discriminate(self(z)).mean())
        opt_g.step()
        self.log("c_loss", loss, sync_dist=True, on_step=True, on_epoch=True)


class VAE(L.LightningModule):
    """log_dict and save_hyperparameters; noise only when asked for."""

    def __init__(
        self,
        hidden: int = 16,
        latent: int = 4,
        beta: float = 0.1,
        lr: float = 1e-3,
        noise: bool = False,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU())
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        eps = torch.randn_like(mu) if self.hparams.noise else torch.zeros_like(mu)
        return self.decoder(mu + eps * (0.5 * logvar).exp()), mu, logvar

    def _shared_step(self, batch, stage):
        x, _ = batch
        x_hat, mu, logvar = self(x)
        recon = F.mse_loss(x_hat, x.flatten(1))
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        losses = {"recon": recon, "kl": kl, "elbo": recon + self.hparams.beta * kl}
        self.log_dict({f"{stage}/{k}": v for k, v in losses.items()}, sync_dist=True)
        return losses["elbo"]

    def training_step(self, batch, batch_idx):
        return self._shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._shared_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class LitAutoEncoder(L.LightningModule):
    """Lightning's first page: modules handed over by the constructor's defaults, no validation."""

    def __init__(self, encoder=None, decoder=None):
        super().__init__()
        self.encoder = encoder or nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = decoder or nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
