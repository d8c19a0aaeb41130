"""Further recipes: of Lightning's examples, of its collection of models (bolts), and of users of
the template.
"""

import copy
import math
import random

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torchmetrics.classification import MulticlassConfusionMatrix

from tests.lightning_habits.contrastive import encoder
from tests.lightning_habits.regression import Manual, Regressor


# ---------------------------------------------------------------- logging
class LogsAtStart(Regressor):
    """Values that only the start of the training, of an epoch or an epoch's first batch logs."""

    def on_train_start(self):
        self.log("start", float(self.trainer.global_step + 1), reduce_fx="sum")
        self.log_dict({"net/depth": 2.0, "net/width": 16.0})
        self.logger.log_metrics({"direct": 1.0}, step=0)

    def on_train_epoch_start(self):
        self.log("began", float(self.current_epoch), reduce_fx="max")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Confusion(L.LightningModule):
    """A confusion matrix over an epoch, and class weights in a buffer that checkpoints leave
    out.
    """

    def __init__(self):
        super().__init__()
        self.net = encoder()
        self.head = nn.Linear(8, 4)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 1.0, 0.5]), persistent=False)
        self.train_matrix, self.val_matrix = (
            MulticlassConfusionMatrix(4),
            MulticlassConfusionMatrix(4),
        )

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        log_p = logits.log_softmax(-1).gather(1, y[:, None])[:, 0]
        loss = -(self.weights[y] * (1 - log_p.exp()) ** 2 * log_p).mean()
        self.train_matrix.update(logits, y)
        self.log("focal", loss, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.log("train/diagonal", self.train_matrix.compute().diagonal().float().sum())
        self.train_matrix.reset()

    def validation_step(self, batch, batch_idx):
        self.val_matrix.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        matrix = self.val_matrix.compute().float()
        self.log_dict(
            {f"val/recall_{i}": matrix[i, i] / matrix[i].sum().clamp(min=1) for i in range(4)}
        )
        self.val_matrix.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


# ---------------------------------------------------------------- self-supervision
class ByolByCallback(L.LightningModule):
    """bolts' BYOL: a callback moves the target network after each batch, with a momentum that
    follows a cosine.
    """

    def __init__(self):
        super().__init__()
        self.online_network = encoder()
        self.target_network = copy.deepcopy(self.online_network)
        self.predictor = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        (a, b), _ = batch
        with torch.no_grad():
            targets = self.target_network(a), self.target_network(b)
        found = self.predictor(self.online_network(b)), self.predictor(self.online_network(a))
        losses = [
            -F.cosine_similarity(x, y, dim=-1).mean() for x, y in zip(found, targets, strict=True)
        ]
        self.log_dict({"1_2_loss": losses[0], "2_1_loss": losses[1]}, sync_dist=True)
        return sum(losses)

    def configure_optimizers(self):
        trained = [*self.online_network.parameters(), *self.predictor.parameters()]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-4)


class MovesTarget(Callback):
    def __init__(self, initial_tau: float = 0.9):
        self.initial_tau = self.current_tau = initial_tau

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        online, target = pl_module.online_network, pl_module.target_network
        for (_, online_p), (_, target_p) in zip(
            online.named_parameters(), target.named_parameters(), strict=True
        ):
            target_p.data = (
                self.current_tau * target_p.data + (1 - self.current_tau) * online_p.data
            )
        steps = len(trainer.train_dataloader) * trainer.max_epochs
        self.current_tau = (
            1 - (1 - self.initial_tau) * (math.cos(math.pi * pl_module.global_step / steps) + 1) / 2
        )

    def state_dict(self):
        return {"tau": self.current_tau}

    def load_state_dict(self, state_dict):
        self.current_tau = state_dict["tau"]


class MemoryBank(L.LightningModule):
    """A bank of features that a momentum average fills, indexed by the label; written by what all
    ranks have seen.
    """

    def __init__(self):
        super().__init__()
        self.net = encoder()
        self.register_buffer(
            "bank", F.normalize(torch.cos(torch.arange(32.0)).reshape(4, 8), dim=1)
        )

    def training_step(self, batch, batch_idx):
        (a, _), y = batch
        z = F.normalize(self.net(a), dim=1)
        loss = F.cross_entropy(z @ self.bank.clone().t() / 0.5, y)
        features, labels = (
            self.all_gather(z.detach()).reshape(-1, 8),
            self.all_gather(y).reshape(-1),
        )
        for label in range(4):
            mean = torch.where((labels == label)[:, None], features, 0.0).sum(0) / (
                labels == label
            ).sum().clamp(min=1)
            self.bank[label] = F.normalize(0.9 * self.bank[label] + 0.1 * mean, dim=0)
        self.log("bank", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


# ---------------------------------------------------------------- optimization
class PPO(Manual):
    """Several passes over parts of a batch with clipped ratios to the policy of before, clipped
    gradients by hand.
    """

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        with torch.no_grad():
            old = self.net(x).sigmoid()
            advantage = y - self.critic(x)
        for _ in range(2):
            ratio = self.net(x).sigmoid() / old
            clipped = ratio.clamp(0.8, 1.2)
            actor = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            critic = F.mse_loss(self.critic(x), y)
            optimizer.zero_grad()
            self.manual_backward(actor + 0.5 * critic)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log_dict({"actor": actor, "critic": critic}, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam([*self.net.parameters(), *self.critic.parameters()], lr=1e-2)


class ManualClipsByTorch(Manual):
    """torch's own clipping within manual optimization."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.shared_step(batch, "train")
        optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), max_norm=0.3)
        optimizer.step()


class MultiTask(L.LightningModule):
    """Heads in a ModuleDict, losses weighed by learned uncertainties; one task is missing in every
    third batch.
    """

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleDict({"sine": nn.Linear(16, 1), "sign": nn.Linear(16, 2)})
        self.log_vars = nn.ParameterDict(
            {"sine": nn.Parameter(torch.zeros(())), "sign": nn.Parameter(torch.zeros(()))}
        )

    def losses(self, batch):
        x, y = batch
        features = self.trunk(x)
        labels = (y[:, 0] > 0).long()
        return {
            "sine": F.mse_loss(self.heads["sine"](features), y),
            "sign": F.cross_entropy(self.heads["sign"](features), labels),
        }

    def training_step(self, batch, batch_idx):
        total = 0.0
        for task, loss in self.losses(batch).items():
            weight = 0.0 if batch_idx % 3 == 2 and task == "sign" else 1.0
            log_var = self.log_vars[task]
            total = total + weight * ((-log_var).exp() * loss + log_var)
            self.log(f"train/{task}", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": total, "tasks": 2}

    def validation_step(self, batch, batch_idx):
        self.log_dict(
            {f"val/{task}": loss for task, loss in self.losses(batch).items()}, sync_dist=True
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Freezes(Regressor):
    """Trains everything at first, and the head alone from the second epoch on."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].requires_grad_(False)


class FreezesByBatch(Regressor):
    """A layer is frozen in the middle of an epoch, and again unfrozen."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net[2].requires_grad_(batch_idx not in (1, 2))


# ---------------------------------------------------------------- models
class TiedAcross(L.LightningModule):
    """An encoder and a decoder that share a weight, in lists of blocks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        self.decoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        self.decoder[1].weight = self.encoder[0].weight
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.decoder(torch.tanh(self.encoder(x))))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class OnPretrained(Regressor):
    """Lightning's transfer learning: another LightningModule, frozen, gives the features."""

    def __init__(self):
        super().__init__()
        self.feature_extractor = Regressor(width=8)
        self.feature_extractor.freeze()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        self.feature_extractor.eval()
        with torch.no_grad():
            features = self.feature_extractor(x)
        return self.net(torch.cat([x, features], dim=1))

    def configure_optimizers(self):
        return torch.optim.SGD(
            filter(lambda p: p.requires_grad, self.parameters()), lr=0.05, momentum=0.9
        )


class WithAdapter(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class InjectsAdapters(Regressor):
    """Replaces its Linear layers by ones with adapters, in configure_model."""

    def configure_model(self):
        for name, layer in self.net.named_children():
            if isinstance(layer, nn.Linear):
                setattr(self.net, name, WithAdapter(layer))


class LateParameterHook(Regressor):
    """A hook on a parameter, added when training begins."""

    def on_train_start(self):
        self.net[0].weight.register_hook(lambda grad: 0.5 * grad)


class MasksRows(Regressor):
    """Trains some rows of a weight alone, by a hook with a mask of its shape, which is removed in
    the last epoch.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", (torch.arange(16) % 2).float().unsqueeze(1))
        self.handle = self.net[0].weight.register_hook(lambda grad: grad * self.mask)

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.handle.remove()


class Draws(Regressor):
    """Mixup with NumPy's and teacher forcing with Python's random numbers."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        share, order = np.random.beta(0.4, 0.4), torch.randperm(len(x))
        x, y = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
        if random.random() < 0.5:
            x = x + 0.01 * torch.randn_like(x)
        return super().training_step((x, y.float()), batch_idx)


# ---------------------------------------------------------------- callbacks
class KeepsBest(Callback):
    """Keeps the best weights in memory and puts them back at the end, as Keras does."""

    def __init__(self):
        self.best, self.weights = float("inf"), None

    def on_validation_end(self, trainer, pl_module):
        score = float(trainer.callback_metrics["val/loss"])
        if score < self.best:
            self.best = score
            self.weights = {
                name: value.detach().clone() for name, value in pl_module.state_dict().items()
            }

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.weights)

    def state_dict(self):
        return {"best": self.best, "weights": self.weights}

    def load_state_dict(self, state_dict):
        self.best, self.weights = state_dict["best"], state_dict["weights"]


class RangeTest(Callback):
    """Raises the rate for five steps, notes the losses, then begins with the rate of the steepest
    fall.
    """

    def __init__(self, steps: int = 5):
        self.steps, self.losses, self.chosen = steps, [], None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        step = trainer.global_step
        rate = 1e-3 * 2**step if step < self.steps else self.chosen
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if len(self.losses) < self.steps:
            self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach())))
            falls = np.diff(self.losses)
            self.chosen = 1e-3 * 2 ** int(np.argmin(falls)) if len(falls) else 1e-3

    def state_dict(self):
        return {"losses": self.losses, "chosen": self.chosen}

    def load_state_dict(self, state_dict):
        self.losses, self.chosen = state_dict["losses"], state_dict["chosen"]
