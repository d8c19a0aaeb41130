"""Optimizers that are chosen, written or wrapped by users, and their groups."""

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tests.lightning_habits.habit import NO_CLIP, SAVED, ddp, fsdp
from tests.lightning_habits.regression import Regressor


class Factors(Regressor):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


class LBFGS(Regressor):
    """A closure that is called several times per step, whose losses a line search compares."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


class OwnOptimizer(Optimizer):
    """What most optimizers of users do: a closure, then an update of each weight."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)
        return loss


class Lists(OwnOptimizer):
    """Shampoo's and SOAP's form: lists and dicts of tensors in the state, which grow."""

    def update(self, p, state, group):
        if not state:
            state.update(GG=[torch.zeros_like(p), None], empty=[])
            state.update(
                {"by_name": {"m": torch.zeros_like(p)}, "history": np.zeros(2), "count": 0.0}
            )
            state["pair"] = (torch.zeros_like(p), 1)
        state["GG"][0].mul_(0.9).add_(p.grad.square())
        state["by_name"]["m"].mul_(0.8).add_(p.grad)
        state["pair"][0].add_(p.grad, alpha=0.1)
        state["history"][0] += 1
        state["count"] += 0.5
        if state["history"][0] == 4:
            state["late"], state["GG"][1] = torch.zeros_like(p), torch.full_like(p, 2.0)
        update = state["by_name"]["m"] + 0.1 * state["pair"][0] + state["count"] * 1e-3
        update = update / (state["GG"][0].sqrt() + 1)
        if "late" in state:
            update = update + 0.1 * state["late"].lerp_(p, 0.3) * state["GG"][1]
        p.add_(update, alpha=-group["lr"])


class KeepsLists(Regressor):
    def configure_optimizers(self):
        return Lists(self.parameters(), {"lr": 1e-2})


class StepHooks(Regressor):
    """torch's hooks around an optimizer's step."""

    def configure_optimizers(self):
        optimizer = self.sgd()

        def center(optimizer, args, kwargs):
            for p in self.parameters():
                if p.grad is not None and p.ndim > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

        optimizer.register_step_pre_hook(center)
        optimizer.register_step_post_hook(lambda *_: self.net[2].bias.data.clamp_(-0.3, 0.3))
        return optimizer


class ScheduleFree(OwnOptimizer):
    """An optimizer that holds other weights for training than for evaluation."""

    def __init__(self, params, lr: float = 0.05):
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    @torch.no_grad()
    def swap(self, train):
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.1 if train else 1 - 1 / 0.9)
                group["train_mode"] = train

    def train(self):
        self.swap(True)

    def eval(self):
        self.swap(False)

    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
        return super().step(closure)

    def update(self, p, state, group):
        if "z" not in state:
            state["z"] = p.clone()
        share = 1 / (group["k"] + 1)
        p.lerp_(state["z"], share)
        p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
        state["z"].sub_(p.grad, alpha=group["lr"])


class SchedulesFree(Regressor):
    def configure_optimizers(self):
        return ScheduleFree(self.parameters())

    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers(use_pl_optimizer=False).train()

    def on_validation_start(self):
        self.optimizers(use_pl_optimizer=False).eval()

    def on_validation_end(self):
        self.optimizers(use_pl_optimizer=False).train()


class Tagged(Regressor):
    """S4's and Mamba's tags on parameters, which configure_optimizers and a hook read."""

    def __init__(self):
        super().__init__()
        self.net[2].weight._optim = {"lr": 0.01, "weight_decay": 0.0}
        self.net[2].bias.is_last = True

    def configure_optimizers(self):
        groups = [{"params": [p for p in self.parameters() if not hasattr(p, "_optim")]}]
        groups += [{"params": [p], **p._optim} for p in self.parameters() if hasattr(p, "_optim")]
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            if getattr(p, "is_last", False):
                p.grad.mul_(0.5)


class SlowWeights(torch.optim.Optimizer):
    """torch_optimizer's Lookahead: counts steps itself, and saves slow weights beside torch's
    entries.
    """

    def __init__(self, optimizer, k=4, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.counter = optimizer, k, alpha, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
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
        self.slow, self.counter = state_dict["slow"], state_dict["counter"]
        self.optimizer.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.param_groups = self.optimizer.param_groups


class Sparse(Regressor):
    """A sparse embedding, trained by SparseAdam, beside a dense optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        # their gradients share memory
        self.tables = nn.ModuleList([nn.Embedding(10, 8, sparse=True) for _ in range(2)])

    def forward(self, x):
        return self.net(x + sum(table((x[:, 0] > 0).long()) for table in self.tables))

    def training_step(self, batch, batch_idx):
        dense, sparse = self.optimizers()
        loss = self.shared_step(batch, "train")
        dense.zero_grad()
        sparse.zero_grad()
        self.manual_backward(loss)
        dense.step()
        sparse.step()

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.05)
        return sgd, torch.optim.SparseAdam(list(self.tables.parameters()), lr=0.01)


HABITS = [
    # fsdp cannot compute the steps of several of these
    ddp(Factors),
    # its estimates of the curvature amplify rounding
    ddp(LBFGS, random=True),
    fsdp(KeepsLists, sample=True),
    fsdp(StepHooks),
    ddp(Sparse, NO_CLIP),
    fsdp(SchedulesFree, sample=True, resume=SAVED),
    fsdp(Tagged),
]
