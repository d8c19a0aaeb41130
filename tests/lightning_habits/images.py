"""Images: lightning-hydra-template, segmentation, adversarial networks, diffusion."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import BinaryJaccardIndex
from torchmetrics.classification.accuracy import Accuracy

from armature.callbacks.ema import EMA
from tests.lightning_habits.habit import NO_CLIP, OWED_AT_END, SAVED, callback, ddp, fsdp


class SimpleNet(nn.Module):
    """lightning-hydra-template's SimpleDenseNet, small."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.model(x.view(x.size(0), -1))


class MNISTLitModule(L.LightningModule):
    """lightning-hydra-template's module: torchmetrics objects, factories as hyperparameters."""

    def __init__(self, model, optimizer, scheduler, compile: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = SimpleNet()
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=4)
        self.val_acc = Accuracy(task="multiclass", num_classes=4)
        self.train_loss, self.val_loss, self.val_acc_best = MeanMetric(), MeanMetric(), MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        # Adam would make full steps of the rounding in the gradient of a bias before BatchNorm
        optimizer = torch.optim.SGD(params=self.trainer.model.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.1, patience=0)
        config = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class UNet(L.LightningModule):
    """BatchNorm, skip connection, IoU, OneCycleLR, outputs as a dict."""

    def __init__(self, width: int = 4, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.train_iou, self.val_iou = BinaryJaccardIndex(), BinaryJaccardIndex()

    def configure_model(self):
        if hasattr(self, "down"):
            return
        width = self.hparams.width
        self.down, self.middle = self.block(1, width), self.block(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Sequential(self.block(2 * width, width), nn.Conv2d(width, 1, 1))

    def block(self, inputs, outputs):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x):
        skip = self.down(x)
        x = self.up(self.middle(F.max_pool2d(skip, 2)))
        return self.last(torch.cat([x, skip], dim=1))[:, 0]

    def training_step(self, batch, batch_idx):
        logits = self(batch["image"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["mask"].float())
        self.train_iou(logits.sigmoid(), batch["mask"])
        self.log("train/iou", self.train_iou, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["logits"].shape == batch["mask"].shape

    def validation_step(self, batch, batch_idx):
        self.val_iou.update(self(batch["image"]).sigmoid(), batch["mask"])

    def on_validation_epoch_end(self):
        self.log("val/iou", self.val_iou.compute())
        self.val_iou.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        scheduler = OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


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


HABITS = [
    ddp(WGAN, NO_CLIP, data="images"),
    ddp(MNISTLitModule, data="images", sample=True, resume=OWED_AT_END),
    fsdp(
        UNet,
        data="masks",
        sample=True,
        resume=SAVED,
        twice=True,
        also=("strategy.activation_checkpointing=every",),
    ),
    ddp(UNet, callback(EMA, decay=0.9), data="masks", name="AveragedUNet"),
    ddp(GAN, NO_CLIP, data="images", sample=True, resume=SAVED),
]
