"""Self-supervised methods: a momentum teacher, a queue, gathered features."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


def encoder(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))


class MoCo(L.LightningModule):
    """Momentum teacher as in MoCo's own code, `param_k.data = …`; a queue of keys in a buffer."""

    def __init__(self, momentum: float = 0.9, temperature: float = 0.2, queue: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer(
            "queue", F.normalize(torch.sin(torch.arange(8.0 * queue)).reshape(8, queue), dim=0)
        )
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        m = self.hparams.momentum
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.data = param_k.data * m + param_q.data * (1.0 - m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = self.all_gather(keys).reshape(-1, keys.shape[-1])
        # in the order of the samples, whichever rank holds them
        keys = keys[keys[:, 0].argsort()]
        ptr, size = int(self.queue_ptr), len(keys)
        self.queue[:, ptr : ptr + size] = keys.T
        self.queue_ptr[0] = (ptr + size) % self.hparams.queue

    def training_step(self, batch, batch_idx):
        (img_q, img_k), _ = batch
        q = F.normalize(self.encoder_q(img_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(img_k), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / self.hparams.temperature
        loss = F.cross_entropy(
            logits, torch.zeros(len(logits), dtype=torch.long, device=self.device)
        )
        self._dequeue_and_enqueue(k)
        self.log("train/acc1", (logits.argmax(1) == 0).float().mean(), sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (img_q, img_k), _ = batch
        similarity = F.cosine_similarity(self.encoder_q(img_q), self.encoder_k(img_k))
        self.log("val/similarity", similarity.mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


class MoCoInPlace(MoCo):
    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.mul_(self.hparams.momentum).add_(param_q, alpha=1.0 - self.hparams.momentum)


class MoCoCopy(MoCo):
    """`param_k.data.mul_().add_()`, as solo-learn and lightly have it."""

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        m = self.hparams.momentum
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.data.mul_(m).add_(param_q.data, alpha=1 - m)


class SimCLR(L.LightningModule):
    """NT-Xent over the features of all ranks; no validation."""

    def __init__(self, temperature: float = 0.5):
        super().__init__()
        self.temperature = temperature
        self.net = encoder()

    def training_step(self, batch, batch_idx):
        (a, b), _ = batch
        z = F.normalize(torch.stack([self.net(a), self.net(b)], dim=1), dim=-1)
        if self.trainer.world_size > 1:
            z = self.all_gather(z, sync_grads=True).flatten(0, 1)
        z = torch.cat([z[:, 0], z[:, 1]])
        similarity = z @ z.T / self.temperature
        similarity = similarity.masked_fill(
            torch.eye(len(z), dtype=torch.bool, device=z.device), -1e9
        )
        target = torch.arange(len(z), device=z.device).roll(len(z) // 2)
        loss = F.cross_entropy(similarity, target)
        self.log("nt_xent", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        ]


class BYOL(L.LightningModule):
    """A deep copy as target, moved at the end of each batch; a predictor with BatchNorm."""

    def __init__(self, tau: float = 0.9):
        super().__init__()
        self.tau = tau
        self.online = encoder()
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.predictor = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)
        )

    def training_step(self, batch, batch_idx):
        (a, b), _ = batch
        loss = self.loss(a, b) + self.loss(b, a)
        self.log("byol", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def loss(self, a, b):
        with torch.no_grad():
            target = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), target, dim=-1).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for online, target in zip(
                self.online.parameters(), self.target.parameters(), strict=True
            ):
                target.lerp_(online, 1 - self.tau)

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class LateTeacher(BYOL):
    """The teacher is made in on_fit_start, by a deep copy, if no checkpoint has brought it."""

    def __init__(self, tau: float = 0.9):
        super().__init__(tau)
        self.target = None

    def on_fit_start(self):
        if self.target is None:
            self.target = copy.deepcopy(self.online).requires_grad_(False)
