"""Optimizers and schedules that keep state in forms of their own."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel

from tests.lightning_habits.regression import Manual, Regressor


class Sharpness(Optimizer):
    """SAM as its widely copied file has it: steps another optimizer, which shares its groups, and
    needs a closure.
    """

    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        for group in self.param_groups:
            scale = group["rho"] / (self._norm() + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure"

    def _norm(self):
        return torch.stack(
            [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        ).norm()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class StepsAnother(Manual):
    def configure_optimizers(self):
        return Sharpness(self.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)

    def training_step(self, batch, batch_idx):
        optimizer, (x, y) = self.optimizers().optimizer, batch
        loss = self.shared_step(batch, "train")
        self.manual_backward(loss)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(F.mse_loss(self(x), y))
        optimizer.second_step(zero_grad=True)
        return loss


class Delegating(Optimizer):
    """timm's Lookahead: its `state_dict` is that of the optimizer that it wraps, with the slow
    weights.
    """

    def __init__(self, base, alpha=0.5, k=3):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._base_optimizer, self.param_groups, self.defaults = (
            base,
            base.param_groups,
            base.defaults,
        )
        self.state, self.alpha, self.k = {}, alpha, k
        for group in base.param_groups:
            group["lookahead_step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self._base_optimizer.step(closure)
        for group in self._base_optimizer.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % self.k == 0:
                for p in group["params"]:
                    entry = self._base_optimizer.state[p]
                    slow = entry.setdefault("lookahead_slow_buff", p.detach().clone())
                    slow.lerp_(p, self.alpha)
                    p.copy_(slow)
        return loss

    def state_dict(self):
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Delegates(Regressor):
    def configure_optimizers(self):
        return Delegating(torch.optim.AdamW(self.parameters(), lr=1e-2))


class Lists(Optimizer):
    """Shampoo's and SOAP's form: lists and dicts of tensors in the entries, which grow while it
    trains.
    """

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                entry = self.state[p]
                if not entry:
                    entry.update(
                        {
                            "GG": [torch.zeros_like(p), None],
                            "by.name": {"m": torch.zeros_like(p)},
                            "empty": [],
                        }
                    )
                    entry.update({"history": np.zeros(2), 0: 0.0, "pair": (torch.zeros_like(p), 1)})
                entry["GG"][0].mul_(0.9).add_(p.grad.square())
                entry["by.name"]["m"].mul_(0.8).add_(p.grad)
                entry["pair"][0].add_(p.grad, alpha=0.1)
                entry["history"][0] += 1
                entry[0] += 0.5
                if entry["history"][0] == 4:
                    entry["late"] = torch.zeros_like(p)
                    entry["GG"][1] = torch.full_like(p, 2.0)
                update = entry["by.name"]["m"] + 0.1 * entry["pair"][0] + entry[0] * 1e-3
                update = update / (entry["GG"][0].sqrt() + 1 + len(entry["empty"]))
                if "late" in entry:
                    entry["late"].lerp_(p, 0.3)
                    update = update + 0.1 * entry["late"] * entry["GG"][1]
                p.add_(update, alpha=-group["lr"])
        return loss


class KeepsLists(Regressor):
    def configure_optimizers(self):
        return Lists(self.parameters())


class Counting(torch.optim.SGD):
    """MADGRAD's form: an entry of the state that belongs to no weight."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.state["k"] = torch.tensor([0])

    def step(self, closure=None):
        self.state["k"] += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + 0.1 * self.state["k"].item())
        return super().step(closure)


class Counts(Regressor):
    def configure_optimizers(self):
        return Counting(self.parameters(), lr=0.05, momentum=0.9)


class NumpyRate(Regressor):
    """A rate that NumPy computes."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2 * np.sqrt(2.0))
        schedule = lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 20))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Warmup(lr_scheduler.LRScheduler):
    """The widely copied warmup before another schedule, which it holds."""

    def __init__(self, optimizer, total, after_scheduler):
        self.total, self.after_scheduler, self.finished = total, after_scheduler, False
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch >= self.total:
            if not self.finished:
                self.after_scheduler.base_lrs = [*self.base_lrs]
                self.finished = True
            return self.after_scheduler.get_last_lr()
        return [base * (self.last_epoch + 1) / (self.total + 1) for base in self.base_lrs]

    def step(self, epoch=None):
        if self.finished:
            self.after_scheduler.step()
            self._last_lr = self.after_scheduler.get_last_lr()
            self.last_epoch += 1
        else:
            super().step(epoch)


class WarmsUp(Regressor):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        after = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        schedule = Warmup(optimizer, 3, after)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class AveragesAfterSteps(Regressor):
    """A hook of torch's moves an average after each step, and counts."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.net, use_buffers=True).requires_grad_(False)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: self.average.update_parameters(self.net))
        return optimizer

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return (
            super().training_step(batch, batch_idx)
            + 0.1 * (self.net(x) - self.average(x).detach()).square().mean()
        )


class StepsLooseTensor(Regressor):
    """A tensor that is trained but is no parameter of the module."""

    def __init__(self):
        super().__init__()
        self.shift = [torch.zeros(1, requires_grad=True)]

    def configure_optimizers(self):
        return torch.optim.Adam([*self.parameters(), *self.shift], lr=1e-2)


class SchedulesDecay(Regressor):
    """DINO's and MAE's weight decay schedule: the group keeps its first value from the first batch
    on.
    """

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            first = group.setdefault("initial_weight_decay", group["weight_decay"])
            group["weight_decay"] = first * (1 + self.global_step)


class NamesGroups(Regressor):
    """Groups hold the names of their parameters, for a printout."""

    def configure_optimizers(self):
        groups = [
            {
                "params": [*layer.parameters()],
                "names": [name for name, _ in layer.named_parameters()],
                "lr": lr,
            }
            for layer, lr in ((self.net[0], 0.05), (self.net[2], 0.01))
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.5)]


class FreezesBackbone(Regressor):
    """The backbone is frozen, so that its group is empty."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in layer.parameters() if p.requires_grad], "lr": lr}
            for layer, lr in ((self.net[0], 0.01), (self.net[2], 0.05))
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return [optimizer], [
            {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        ]


class SizesSteps(Optimizer):
    """Computes the size of its steps.

    COCOB's groups have no rate, transformers' Adafactor's may have None.
    """

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                total = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad.abs())
                p.sub_(p.grad / (50 * (1 + total)))
        return loss


class HasNoRate(Regressor):
    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def configure_optimizers(self):
        return SizesSteps(self.parameters(), {**self.settings})


class SetsRateAtStart(Regressor):
    """A rate and a group for the start of training, set by hand.

    The rate is raised by hand, too.
    """

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.05, momentum=0.9)

    def on_train_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.add_param_group({"params": self.net[0].parameters()})
        for group in optimizer.param_groups:
            group["lr"] = 0.001

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 1.2


class BeginsOptimizerAnew(Regressor):
    """The optimizer begins anew with each epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch > 0:
            self.trainer.optimizers = [self.configure_optimizers()]


class ReplacesHead(Regressor):
    """The head is drawn anew for the second epoch and the optimizer with it, as in
    class-incremental learning.
    """

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [
            {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        ]

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[2] = torch.nn.Linear(16, 1).to(self.device)
            self.trainer.strategy.setup_optimizers(self.trainer)
