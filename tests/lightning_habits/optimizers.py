"""Optimizers that are chosen, written or wrapped by users, and their groups."""

import torch
from torch import nn
from torch.optim import Optimizer

from tests.lightning_habits.habit import NO_CLIP, ddp, fsdp
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
    fsdp(StepHooks),
    ddp(Sparse, NO_CLIP),
]
