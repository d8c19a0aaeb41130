"""Kinds of weights, averages and optimizers of one's own, and parts of weights that are set by
hand.
"""

import copy
import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.lightning_habits.regression import Regressor


class RecomputesSelectively(Regressor):
    """Gradient checkpointing of each block, which keeps matrix products."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x):
        keeps = functools.partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
        )
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=keeps)
        return self.net(x)


# ---------------------------------------------------------------- kinds of weights
class MixedTypes(Regressor):
    """A part in double precision."""

    def __init__(self):
        super().__init__()
        self.precise = nn.Linear(8, 8).double()

    def forward(self, x):
        return self.net(self.precise(x.double()).float())


class OddParameters(Regressor):
    """Weights that are no matrices of floats: integers, an empty one, a number, one that is not
    contiguous.
    """

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8).T)
        self.register_buffer("flags", torch.arange(8) % 2 == 0)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += self.training
        x = torch.cat([x, self.nothing * 2])[:, self.order]
        return self.net(self.number * torch.where(self.flags, x, -x) @ self.turned)


class Materialized(Regressor):
    """Lazy layers, whose shapes a forward pass in configure_model decides."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1))

    def configure_model(self):
        if any(nn.parameter.is_lazy(p) for p in self.parameters()):
            self.net(torch.zeros(2, 8))


class MaterializedInSetup(Materialized):
    def configure_model(self):
        pass

    def setup(self, stage):
        Materialized.configure_model(self)


class ShadowBuffers(Regressor):
    """Latent diffusion's averages: a buffer for each weight, swapped in for validation and back
    after it.
    """

    def __init__(self):
        super().__init__()
        self.keys = {name: name.replace(".", "") for name, _ in self.net.named_parameters()}
        self.shadow = nn.Module()
        for name, p in self.net.named_parameters():
            self.shadow.register_buffer(self.keys[name], p.detach().clone())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            shadow = dict(self.shadow.named_buffers())
            for name, p in self.net.named_parameters():
                average = shadow[self.keys[name]]
                average.sub_(0.2 * (average - p))

    def on_validation_epoch_start(self):
        self.stored = [p.clone() for p in self.net.parameters()]
        shadow = dict(self.shadow.named_buffers())
        for name, p in self.net.named_parameters():
            p.data.copy_(shadow[self.keys[name]].data)

    def on_validation_epoch_end(self):
        for old, p in zip(self.stored, self.net.parameters(), strict=True):
            p.data.copy_(old.data)


class ScheduleFree(torch.optim.Optimizer):
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

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                share = 1 / (group["k"] + 1)
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
        return loss


class SchedulesFree(Regressor):
    def configure_optimizers(self):
        return ScheduleFree(self.parameters())

    def on_train_epoch_start(self):
        self.optimizers().optimizer.train()

    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers(use_pl_optimizer=False).train()

    def on_validation_start(self):
        self.optimizers(use_pl_optimizer=False).eval()

    def on_validation_end(self):
        self.optimizers(use_pl_optimizer=False).train()


class SwapsAverage(Regressor):
    """An average of the weights is a submodule, and takes their place while the module
    validates.
    """

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def swap(self):
        for weight, average in zip(self.net.parameters(), self.average.parameters(), strict=True):
            kept = weight.detach().clone()
            weight.data.copy_(average)
            average.copy_(kept)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for weight, average in zip(self.net.parameters(), self.average.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.1)

    @torch.no_grad()
    def on_validation_start(self):
        self.swap()

    @torch.no_grad()
    def on_validation_end(self):
        self.swap()


class LoadsAtStart(Regressor):
    """Whole pretrained weights of a part are loaded in on_fit_start."""

    def on_fit_start(self):
        generator = torch.Generator().manual_seed(3)
        self.net[0].load_state_dict(
            {"weight": 0.3 * torch.randn(16, 8, generator=generator), "bias": torch.zeros(16)}
        )


# ---------------------------------------------------------------- parts of weights that are set by
# hand
class SetsRows(Regressor):
    """Rows of a weight are kept at a value: those of padding, or of units that are switched off."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.net[0].weight[:2] = 0.25
        self.net[0].weight.data[14] = torch.linspace(0, 1, 8)


class SetsColumns(Regressor):
    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.net[0].weight[:, :2] = 0.0
        self.net[0].weight.data[:, 7].mul_(0.5)


class ZeroesRow(Regressor):
    """The same through a part of the weight, in place."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.net[0].weight.data[3].fill_(0.0)
        self.net[0].bias[15].zero_()


class ScalesRows(Regressor):
    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.net[0].weight[2:5] *= 0.5
        self.net[0].bias[4:6] += 0.1


class ZeroesGradients(Regressor):
    """Gradients of rows are set to zero, so that these stay as they are."""

    def on_before_optimizer_step(self, optimizer):
        self.net[0].weight.grad[:4] = 0
        self.net[0].weight.grad[:, 1].zero_()
        self.net[0].bias.grad[3].mul_(0.0)


class ZeroesDiagonal(Regressor):
    """No node is its own parent: the diagonal is set to 0 after each step, as in NOTEARS."""

    def __init__(self, way="diagonal"):
        super().__init__()
        self.way, self.graph = way, nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.net(x + self.graph(x))

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.way == "diagonal":
            self.graph.weight.diagonal().zero_()
        elif self.way == "fill":
            self.graph.weight.data.fill_diagonal_(0)
        else:
            self.graph.weight.tensor_split(2)[0].zero_()


class ClampsAfterForward(Regressor):
    """Bounds a bias in training_step, once the loss is computed: backward does not need it."""

    def __init__(self, way="weight"):
        super().__init__()
        self.way = way

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch, "train")
        bias = self.net[2].bias
        with torch.no_grad():
            (bias if self.way == "weight" else bias.data).clamp_(-0.02, 0.02)
        return loss


# ---------------------------------------------------------------- weights that are kept elsewhere,
# or share memory
def l1(weight, scale=0.1):
    return scale * weight.abs().sum()


class KeepsPartial(Regressor):
    """A penalty that is made in __init__ for one weight."""

    def __init__(self, way="partial"):
        super().__init__()
        weight = self.net[0].weight
        self.penalty = functools.partial(l1, weight) if way == "partial" else lambda: l1(weight)

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train") + self.penalty()


class TiedByData(Regressor):
    """The decoder's weight is the encoder's memory."""

    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.dec.weight.data = self.enc.weight.data.t()

    def forward(self, x):
        return self.net(self.dec(torch.tanh(self.enc(x))))
