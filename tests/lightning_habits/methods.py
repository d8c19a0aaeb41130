"""Methods of papers, small: distillation, contrastive pairs, codebooks, target networks, inner
loops.
"""

import copy
import math

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.lightning_habits.contrastive import encoder
from tests.lightning_habits.regression import Regressor


class DINO(L.LightningModule):
    """Student and teacher over several crops; a center that is reduced by torch.distributed;
    schedules by hand.
    """

    def __init__(self, momentum: float = 0.9):
        super().__init__()
        self.save_hyperparameters()
        head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False))
        self.student = nn.Sequential(encoder(), head)
        self.teacher = nn.Sequential(encoder(), nn.Linear(8, 6, bias=False))
        self.teacher[0].load_state_dict(self.student[0].state_dict())
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.register_buffer("center", torch.zeros(1, 6))

    def on_train_batch_start(self, batch, batch_idx):
        step = self.trainer.global_step
        for i, group in enumerate(self.trainer.optimizers[0].param_groups):
            group["lr"] = 0.05 * (1 + math.cos(math.pi * step / 18))
            if i == 0:
                group["weight_decay"] = 0.01 + 0.001 * step

    @torch.no_grad()
    def update_center(self, out):
        center = out.sum(dim=0, keepdim=True)
        count = float(len(out))
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(center)
            count *= dist.get_world_size()
        self.center = 0.9 * self.center + 0.1 * center / count

    def training_step(self, batch, batch_idx):
        crops, _ = batch
        out = self.student(torch.cat(list(crops))).chunk(2)
        with torch.no_grad():
            wanted = self.teacher(torch.cat(list(crops)))
            targets = ((wanted - self.center) / 0.5).softmax(-1).chunk(2)
        pairs = [(0, 1), (1, 0)]
        loss = (
            sum(-(targets[i] * (out[j] / 0.3).log_softmax(-1)).sum(-1).mean() for i, j in pairs) / 2
        )
        self.update_center(wanted)
        self.log("dino", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_after_backward(self):
        if self.current_epoch < 1:  # the last layer is kept for an epoch
            for name, p in self.student.named_parameters():
                if name.startswith("1."):
                    p.grad = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        m = self.hparams.momentum
        with torch.no_grad():
            for q, k in zip(
                self.student[0].parameters(), self.teacher[0].parameters(), strict=True
            ):
                k.data.mul_(m).add_((1 - m) * q.detach().data)

    def configure_optimizers(self):
        decayed = [p for p in self.student.parameters() if p.ndim > 1]
        others = [p for p in self.student.parameters() if p.ndim <= 1]
        return torch.optim.SGD(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=0.05,
            momentum=0.9,
            weight_decay=0.01,
        )


class CLIP(L.LightningModule):
    """Two towers, features of all ranks with gradients, a clamped temperature."""

    def __init__(self):
        super().__init__()
        self.image, self.text = encoder(), encoder()
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(5.0))

    def training_step(self, batch, batch_idx):
        (a, b), _ = batch
        a, b = F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1)
        if self.trainer.world_size > 1:
            a = self.all_gather(a, sync_grads=True).flatten(0, 1)
            b = self.all_gather(b, sync_grads=True).flatten(0, 1)
        logits = self.logit_scale.exp() * a @ b.t()
        labels = torch.arange(len(logits), device=self.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        self.log("clip", loss, sync_dist=True)
        self.log("scale", self.logit_scale.exp())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.logit_scale.data = torch.clamp(self.logit_scale.data, 0, math.log(100))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class CLIPInPlace(CLIP):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.logit_scale.clamp_(0, math.log(100))


class VQVAE(L.LightningModule):
    """A codebook in buffers that moves by averages over all ranks; a straight-through estimator."""

    def __init__(self, codes: int = 8):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 4), nn.Linear(4, 64)
        self.register_buffer("codebook", torch.sin(torch.arange(4.0 * codes)).reshape(codes, 4))
        self.register_buffer("counts", torch.ones(codes))

    def quantize(self, z):
        index = torch.cdist(z.detach(), self.codebook).argmin(1)
        return self.codebook[index], index

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.flatten(1)
        z = self.encoder(x)
        quantized, index = self.quantize(z)
        rec = self.decoder(z + (quantized - z).detach())
        loss = F.mse_loss(rec, x) + 0.25 * F.mse_loss(z, quantized)
        with torch.no_grad():
            hot = F.one_hot(index, len(self.codebook)).float()
            counts = self.trainer.strategy.reduce(hot.sum(0), reduce_op="sum")
            sums = self.trainer.strategy.reduce(hot.T @ z, reduce_op="sum")
            self.counts.mul_(0.9).add_(counts, alpha=0.1)
            means = sums / counts.clamp(min=1).unsqueeze(1)
            self.codebook.copy_(
                torch.where(
                    counts.unsqueeze(1) > 0, 0.9 * self.codebook + 0.1 * means, self.codebook
                )
            )
        self.log("vq", loss, sync_dist=True)
        self.log("used", (self.counts > 0.5).float().sum())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class DQN(Regressor):
    """A target network that takes the network's state every four steps."""

    def __init__(self):
        super().__init__()
        self.target_net = copy.deepcopy(self.net)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            wanted = y + 0.9 * self.target_net(x)
        loss = F.smooth_l1_loss(self.net(x), wanted)
        if self.global_step % 4 == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log("total", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


class Diffusion(L.LightningModule):
    """Noise and times are drawn in each step; schedule in buffers, an embedding of times."""

    def __init__(self, steps: int = 10):
        super().__init__()
        betas = torch.linspace(1e-3, 0.2, steps)
        self.register_buffer("alphas", (1 - betas).cumprod(0), persistent=False)
        self.time, self.net = (
            nn.Embedding(steps, 16),
            nn.Sequential(nn.Linear(80, 16), nn.SiLU(), nn.Linear(16, 64)),
        )

    def loss(self, x):
        t = torch.randint(0, len(self.alphas), (len(x),), device=self.device)
        noise = torch.randn_like(x)
        a = self.alphas[t].unsqueeze(1)
        return F.mse_loss(
            self.net(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, self.time(t)], dim=1)), noise
        )

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0].flatten(1))
        self.log("train_loss", loss, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch[0].flatten(1)), sync_dist=True)

    @torch.no_grad()
    def on_validation_epoch_end(self):
        self.log("sample", torch.randn(2, 64, device=self.device).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class InnerLoop(Regressor):
    """An adapted copy of the weights in each step, by torch.func (MAML)."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        params = dict(self.net.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(self.net, params, (x,)), y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        adapted = {name: p - 0.05 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        return F.mse_loss(torch.func.functional_call(self.net, adapted, (x,)), y)


class PerSample(Regressor):
    """Gradients of each sample by vmap: the mean of their norms is logged."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        params = {name: p.detach() for name, p in self.net.named_parameters()}

        def loss(params, x, y):
            return F.mse_loss(
                torch.func.functional_call(self.net, params, (x.unsqueeze(0),)), y.unsqueeze(0)
            )

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
        norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
        self.log("per_sample", norms.mean(), sync_dist=True)
        return super().training_step(batch, batch_idx)


class Physics(Regressor):
    """A loss over second derivatives of the inputs."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_(True)
        u = self(x)
        first = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        second = torch.autograd.grad(
            first[:, 0], x, torch.ones_like(first[:, 0]), create_graph=True
        )[0][:, 0]
        loss = F.mse_loss(u, y) + 0.1 * (second + u[:, 0]).square().mean()
        self.log("physics", loss, sync_dist=True)
        return loss


class Flow(L.LightningModule):
    """Forward returns a distribution; log_prob is the loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)

    def forward(self, x):
        mean, scale = self.net(x).chunk(2, dim=-1)
        return torch.distributions.Normal(mean, F.softplus(scale) + 1e-2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = -self(x).log_prob(y).mean()
        self.log("nll", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3, momentum=0.5, centered=True)


class Distilled(Regressor):
    """A teacher that is a LightningModule, frozen by Lightning's freeze()."""

    def __init__(self):
        super().__init__()
        self.teacher = Regressor(width=8)
        self.teacher.freeze()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        self.teacher.eval()
        return super().training_step(batch, batch_idx) + 0.5 * F.mse_loss(self(x), self.teacher(x))

    def configure_optimizers(self):
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9
        )


class Centers(L.LightningModule):
    """A loss with weights of its own and an optimizer of their own, both in one list of groups;
    accuracy by hand.
    """

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.centers = nn.Parameter(torch.cos(torch.arange(32.0)).reshape(4, 8))
        self.right = self.total = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.net(x)
        distances = torch.cdist(z, self.centers)
        self.right += int((distances.argmin(1) == y).sum())
        self.total += len(y)
        return F.cross_entropy(-distances, y) + 0.01 * (z - self.centers[y]).square().sum(1).mean()

    def on_train_epoch_end(self):
        counts = torch.tensor([self.right, self.total], dtype=torch.float, device=self.device)
        right, total = self.trainer.strategy.reduce(counts, reduce_op="sum")
        self.log("accuracy", right / total)
        self.right = self.total = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["counts"] = self.right, self.total

    def on_load_checkpoint(self, checkpoint):
        self.right, self.total = checkpoint["counts"]

    def configure_optimizers(self):
        return torch.optim.SGD(
            [
                {"params": self.net.parameters(), "lr": 0.05},
                {"params": [self.centers], "lr": 0.1, "momentum": 0.5},
            ]
        )


class Detector(L.LightningModule):
    """Lists of targets of unequal length, as detectors have them; a dict of losses, summed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
        self.boxes, self.classes = nn.Linear(8, 4), nn.Linear(8, 4)

    def losses(self, images, targets):
        h = self.body(torch.stack(images))
        boxes = torch.stack([target["boxes"].mean(0) for target in targets])
        labels = torch.stack([target["labels"][0] for target in targets])
        return {
            "box": F.smooth_l1_loss(self.boxes(h), boxes),
            "class": F.cross_entropy(self.classes(h), labels),
        }

    def training_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        self.log_dict(
            {f"train_{name}": value for name, value in losses.items()},
            batch_size=len(batch[0]),
            sync_dist=True,
        )
        return {
            "loss": sum(losses.values()),
            **{name: value.detach() for name, value in losses.items()},
        }

    def validation_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        self.log("val_loss", sum(losses.values()), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Recurrent(L.LightningModule):
    """Truncated backpropagation: one batch, several steps of the optimizer over parts of the
    sequence.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.cell, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        opt, hidden = self.optimizers(), None
        for part in x.split(2, dim=1):
            out, hidden = self.cell(part, hidden)
            loss = F.cross_entropy(self.head(out[:, -1]), y)
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            hidden = hidden.detach()
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
