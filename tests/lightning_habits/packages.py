"""Averages, optimizers and parameters as packages have them."""

from __future__ import annotations

import copy

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import lr_scheduler

from tests.lightning_habits.regression import Regressor


# ---------------------------------------------------------------- averages
class EmaPytorch(nn.Module):
    """ema_pytorch's form."""

    def __init__(self, model, beta=0.9, update_every=2, update_after_step=3):
        super().__init__()
        self.beta, self.update_every, self.update_after_step = beta, update_every, update_after_step
        self.online_model = [model]
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    model = property(lambda self: self.online_model[0])

    @torch.no_grad()
    def copy_params(self):
        for ma, current in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
            ma.data.copy_(current.data)

    @torch.no_grad()
    def update(self):
        step = self.step.item()
        self.step += 1
        if step % self.update_every != 0:
            return
        if step <= self.update_after_step:
            self.copy_params()
            return
        if not self.initted.item():
            self.copy_params()
            self.initted.data.copy_(torch.tensor(True))
        for ma, current in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
            ma.data.lerp_(current.data, 1.0 - self.beta)

    def forward(self, *args, **kwargs):
        return self.ema_model(*args, **kwargs)


class AveragedByEma(Regressor):
    def __init__(self):
        super().__init__()
        self.ema = EmaPytorch(self.net)

    def on_before_zero_grad(self, *args):
        self.ema.update()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.mse_loss(self.ema(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


class ModelEma(nn.Module):
    """timm's ModelEmaV2."""

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema, value in zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        ):
            ema.copy_(self.decay * ema + (1 - self.decay) * value)


class AveragedByTimm(Regressor):
    def __init__(self):
        super().__init__()
        self.model_ema = ModelEma(self.net)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.model_ema.update(self.net)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.mse_loss(self.model_ema.module(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


class EMAOptimizer(torch.optim.Optimizer):
    """NeMo's: wraps an optimizer and holds averages beside it."""

    def __init__(self, optimizer, decay=0.9):
        self.optimizer, self.decay, self.ema_params, self.current_step = optimizer, decay, (), 0

    def all_parameters(self):
        return (param for group in self.param_groups for param in group["params"])

    @torch.no_grad()
    def update(self):
        for ema, param in zip(self.ema_params, self.all_parameters(), strict=True):
            ema.mul_(self.decay).add_(param.detach(), alpha=1 - self.decay)

    def step(self, closure=None, **kwargs):
        if not self.ema_params:
            self.ema_params = tuple(p.detach().clone() for p in self.all_parameters())
        loss = self.optimizer.step(closure)
        self.update()
        self.current_step += 1
        return loss

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def state_dict(self):
        return {
            "opt": self.optimizer.state_dict(),
            "ema": self.ema_params,
            "current_step": self.current_step,
        }

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["opt"])
        own = self.all_parameters()
        self.ema_params = tuple(
            value.to(p.device, copy=True) for value, p in zip(state_dict["ema"], own, strict=True)
        )
        self.current_step = state_dict["current_step"]


class NemoEMA(Callback):
    def on_fit_start(self, trainer, pl_module):
        trainer.optimizers = [
            o if isinstance(o, EMAOptimizer) else EMAOptimizer(o) for o in trainer.optimizers
        ]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        total = sum(value.sum() for value in trainer.optimizers[0].ema_params)
        pl_module.log("average", total.full_tensor() if hasattr(total, "full_tensor") else total)


# ---------------------------------------------------------------- optimizers
class StepHooks(Regressor):
    """torch's hooks around an optimizer's step."""

    def configure_optimizers(self):
        optimizer = self.sgd()

        def center(optimizer, args, kwargs):
            for p in self.parameters():
                if p.grad is not None and p.ndim > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

        @torch.no_grad()
        def clamp(optimizer, args, kwargs):
            for p in self.parameters():
                p.clamp_(-0.3, 0.3)

        optimizer.register_step_pre_hook(center)
        optimizer.register_step_post_hook(clamp)
        return optimizer


class TensorRate(Regressor):
    """A learning rate that is a tensor, weights that are maximized, one group with a bare
    parameter.
    """

    def training_step(self, batch, batch_idx):
        return -super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        groups = [
            {"params": self.net[0].parameters(), "lr": torch.tensor(0.02)},
            {"params": self.net[2].weight},
        ]
        optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.01), maximize=True, foreach=False)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]


class Muon(torch.optim.Optimizer):
    """Keller Jordan's SingleDeviceMuonWithAuxAdam, short."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                if p.ndim == 2:
                    update = self.orthogonal(update)
                p.add_(update, alpha=-group["lr"])
        return loss

    @staticmethod
    def orthogonal(g):
        x = g / (g.norm() + 1e-7)
        tall = x.size(0) > x.size(1)
        x = x.mT if tall else x
        for _ in range(5):
            a = x @ x.mT
            b = -4.7750 * a + 2.0315 * a @ a
            x = 3.4445 * x + b @ x
        return x.mT if tall else x


class Muons(Regressor):
    def configure_optimizers(self):
        return Muon(self.parameters())


class Prodigy(torch.optim.Optimizer):
    """The core of Prodigy and D-Adaptation: a rate estimated over all weights, by sums that become
    numbers.
    """

    def __init__(self, params, lr=1.0, d0=1e-2):
        super().__init__(params, {"lr": lr, "d": d0, "numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        d, numerator, denominator = group["d"], 0.9 * group["numerator"], 0.0
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["p0"], state["s"] = p.detach().clone(), torch.zeros_like(p)
                state["v"] = torch.zeros_like(p)
            numerator += d * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()
            state["s"].mul_(0.9).add_(p.grad, alpha=d)
            state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=d * d)
            denominator += state["s"].abs().sum().item()
        group["numerator"], group["k"] = numerator, group["k"] + 1
        group["d"] = max(d, min(numerator / max(denominator, 1e-12), 1.05 * d))
        for p in group["params"]:
            p.addcdiv_(p.grad, self.state[p]["v"].sqrt().add_(1e-3), value=-0.1 * group["d"])
        return loss


class Prodigies(Regressor):
    def configure_optimizers(self):
        return Prodigy(self.parameters())


class SlowWeights(torch.optim.Optimizer):
    """torch_optimizer's Lookahead: counts steps itself, and saves slow weights beside torch's
    entries.
    """

    def __init__(self, optimizer, k=4, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.counter = optimizer, k, alpha, 0
        self.param_groups, self.defaults = optimizer.param_groups, {"k": k, **optimizer.defaults}
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    state = property(lambda self: self.optimizer.state)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.counter = (self.counter + 1) % self.k
        if not self.counter:
            with torch.no_grad():
                for group, slow in zip(self.param_groups, self.slow, strict=True):
                    for p, q in zip(group["params"], slow, strict=True):
                        q.lerp_(p, self.alpha)
                        p.copy_(q)
        return loss

    def state_dict(self):
        return {**self.optimizer.state_dict(), "slow": self.slow, "counter": self.counter}

    def load_state_dict(self, state_dict):
        groups = zip(state_dict["slow"], self.slow, strict=True)
        self.slow = [
            [x.to(old) for x, old in zip(new, known, strict=True)] for new, known in groups
        ]
        self.counter = state_dict["counter"]
        self.optimizer.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.param_groups = self.optimizer.param_groups


class LooksAhead(Regressor):
    def configure_optimizers(self):
        return SlowWeights(self.sgd())


class ManifoldParameter(nn.Parameter):
    """geoopt's form: a parameter of a class of its own, with an attribute that the optimizer asks
    for.
    """

    radius: float

    def __new__(cls, data, radius=1.0):
        made = torch.Tensor._make_subclass(cls, data, True)
        made.radius = radius
        return made


class RiemannianSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, ManifoldParameter):
                    p.mul_(p.radius / p.norm())
        return loss


class OnSphere(Regressor):
    def __init__(self):
        super().__init__()
        self.scale = ManifoldParameter(torch.ones(8), 2.0)

    def forward(self, x):
        return self.net(x * self.scale)

    def configure_optimizers(self):
        return RiemannianSGD(self.parameters(), lr=0.05)


class Tagged(Regressor):
    """S4's and Mamba's tags on parameters, which configure_optimizers and a hook read."""

    def __init__(self):
        super().__init__()
        self.net[0].bias._no_weight_decay = True
        self.net[2].weight._optim = {"lr": 0.01}
        self.net[2].bias.is_last = True

    def configure_optimizers(self):
        decay = [
            p
            for p in self.parameters()
            if not hasattr(p, "_no_weight_decay") and not hasattr(p, "_optim")
        ]
        groups = [{"params": decay, "weight_decay": 0.1}]
        groups += [
            {"params": [p], "weight_decay": 0.0}
            for p in self.parameters()
            if hasattr(p, "_no_weight_decay")
        ]
        groups += [{"params": [p], **p._optim} for p in self.parameters() if hasattr(p, "_optim")]
        return torch.optim.AdamW(groups, lr=0.02)

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            if getattr(p, "is_last", False):
                p.grad.mul_(0.5)


class StepsInBackward(L.LightningModule):
    """GaLore's and LOMO's per-layer updates: an optimizer per weight steps inside of the backward
    pass.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def on_fit_start(self):
        self.steppers = {p: torch.optim.SGD([p], lr=0.05) for p in self.parameters()}

        def step(p):
            self.steppers[p].step()
            self.steppers[p].zero_grad()

        for p in self.parameters():
            p.register_post_accumulate_grad_hook(step)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.manual_backward(loss)
        self.log("train/loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return None
