"""Momentum teachers, contrastive pairs, queues and averages of weights."""

import copy
import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.lightning_habits.habit import INSIDE, OWED, WHOLE, ddp, fsdp, stock
from tests.lightning_habits.regression import Regressor


def encoder(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8))


class MoCo(L.LightningModule):
    """Momentum teacher as in MoCo's own code, `param_k.data = …`; a queue of keys in a buffer."""

    def __init__(self, momentum: float = 0.9, temperature: float = 0.2, queue: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.encoder_q, self.encoder_k = encoder(), encoder()
        for param_q, param_k in self.pairs():
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        keys = torch.sin(torch.arange(8.0 * queue)).reshape(8, queue)
        self.register_buffer("queue", F.normalize(keys, dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def pairs(self):
        return zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True)

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
        q, m = F.normalize(self.encoder_q(img_q), dim=1), self.hparams.momentum
        with torch.no_grad():
            for param_q, param_k in self.pairs():
                param_k.data = param_k.data * m + param_q.data * (1.0 - m)
            k = F.normalize(self.encoder_k(img_k), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / self.hparams.temperature
        self._dequeue_and_enqueue(k)
        self.log("train/acc1", (logits.argmax(1) == 0).float().mean(), sync_dist=True)
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


class SimCLR(L.LightningModule):
    """NT-Xent over the features of all ranks; no validation."""

    def __init__(self):
        super().__init__()
        self.net = encoder()

    def training_step(self, batch, batch_idx):
        (a, b), _ = batch
        own = F.normalize(self.net(a), dim=-1), F.normalize(self.net(b), dim=-1)
        z = torch.cat([self.all_gather(each, sync_grads=True).flatten(0, -2) for each in own])
        # a sample's similarity with itself is 1
        others = torch.exp(torch.cat(own) @ z.t().contiguous() / 0.5).sum(1) - math.exp(2)
        loss = (others.log() - (own[0] * own[1]).sum(1).div(0.5).repeat(2)).mean()
        self.log("nt_xent", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class BYOL(L.LightningModule):
    """A deep copy as target, moved at the end of each batch; a predictor with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.online = encoder()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)
        )

    def loss(self, a, b):
        with torch.no_grad():
            target = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), target, dim=-1).mean()

    def training_step(self, batch, batch_idx):
        (a, b), _ = batch
        loss = self.loss(a, b) + self.loss(b, a)
        self.log("byol", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.lerp_(online, 0.1)

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class LateTeacher(BYOL):
    """The teacher is made in on_fit_start, if no checkpoint has brought it."""

    def __init__(self):
        super().__init__()
        self.target = None

    def on_fit_start(self):
        if self.target is None:
            self.target = copy.deepcopy(self.online).requires_grad_(False)


class Averaged(Regressor):
    """torch's AveragedModel inside the module, which validates the average."""

    def __init__(self):
        super().__init__()
        nn.init.ones_(self.net[2].bias)  # near 0 its rounding would be compared
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_before_optimizer_step(self, optimizer):
        self.average.update_parameters(self.net)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.mse_loss(self.average(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


class SwapsAverage(Regressor):
    """An average of the weights is a submodule, and takes their place in validation."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def pairs(self):
        return zip(self.net.parameters(), self.average.parameters(), strict=True)

    @torch.no_grad()
    def swap(self):
        for weight, average in self.pairs():
            kept = weight.detach().clone()
            weight.data.copy_(average)
            average.copy_(kept)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for weight, average in self.pairs():
            average.lerp_(weight.detach(), 0.1)

    def on_validation_start(self):
        self.swap()

    def on_validation_end(self):
        self.swap()


class TeacherAtStart(SwapsAverage):
    """Copies the model into its teacher in on_train_start, which also runs after a resume."""

    def on_train_start(self):
        self.average.load_state_dict(self.net.state_dict())

    def swap(self):
        pass

    def validation_step(self, batch, batch_idx):
        self.log("val/teacher", F.mse_loss(self.average(batch[0]), batch[1]), sync_dist=True)
        return super().validation_step(batch, batch_idx)


HABITS = [
    fsdp(MoCo, data="views", sample=True),
    fsdp(SimCLR, data="views"),
    ddp(BYOL, data="views"),
    fsdp(LateTeacher, data="views", also=WHOLE, twice=True),
    fsdp(Averaged),
    ddp(Regressor, stock("EMAWeightAveraging", decay=0.9), name="EMAWeightAveraging"),
    fsdp(SwapsAverage, sample=True, resume=OWED),
    fsdp(TeacherAtStart, resume=INSIDE),
]
