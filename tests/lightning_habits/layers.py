"""Weights and layers: parametrizations, hooks, buffers, BatchNorm, frozen and late parts."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import armature
from tests.lightning_habits.habit import FIND_UNUSED, WHOLE, ddp, fsdp
from tests.lightning_habits.loaders import Vectors
from tests.lightning_habits.regression import Regressor


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


class Parametrized(Regressor):
    """A parametrization of one's own, and an orthogonal one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        parametrize.register_parametrization(self.first, "weight", Symmetric())
        self.second = parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x):
        return self.net(torch.tanh(self.second(self.first(x))))


class ParameterHooks(Regressor):
    """A hook on a parameter, which masks its gradient, as transfer learning of single rows does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", (torch.arange(16) % 2).float().unsqueeze(1))
        self.net[0].weight.register_hook(lambda grad: grad * self.mask)


class GrowingBuffer(Regressor):
    """A memory of past features, whose length grows: a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, 8))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        gathered = self.all_gather(x.mean(0)).reshape(-1, 8).mean(0, keepdim=True)
        self.memory = torch.cat([self.memory, gathered])[-32:]
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.net(self.memory).square().mean()


class CompiledWrapper(Regressor):
    """torch.compile in configure_model: names begin with _orig_mod."""

    def configure_model(self):
        if not hasattr(self.net, "_orig_mod"):
            self.net = torch.compile(self.net, backend="eager")


class ComplexWeights(Regressor):
    """A Fourier layer: complex weights."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.complex(torch.ones(5), torch.zeros(5)))

    def forward(self, x):
        return self.net(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=8))


class OddParameters(Regressor):
    """Weights of integers, an empty one, a number, and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8).T)

    def forward(self, x):
        x = torch.cat([x, self.nothing * 2])[:, self.order]
        return self.net(self.number * x @ self.turned)


class SometimesUsed(Regressor):
    """A branch that only some batches take."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x) + (self.branch(x) if batch_idx % 2 else 0)
        return F.mse_loss(out, y)


class InPlace(Regressor):
    """A layer's output changes in place; of samples with positions it is a view."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x = self.inner(x[:, None])
        x += 0.5
        return self.net(x)[:, 0]


class Penalized(Regressor):
    """Penalties that are sums and means of weights."""

    def training_step(self, batch, batch_idx):
        penalty = sum(param.square().sum() for param in self.net[0].parameters())
        penalty = penalty + self.net[0].weight.abs().mean()
        return super().training_step(batch, batch_idx) + 0.03 * penalty


class WithAdapter(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class InjectsAdapters(Regressor):
    """Replaces its Linear layers by ones with adapters, in configure_model."""

    def configure_model(self):
        for name, layer in self.net.named_children():
            if isinstance(layer, nn.Linear):
                setattr(self.net, name, WithAdapter(layer))


class SetsRows(Regressor):
    """Rows of a weight are kept at a value: those of padding, or of units that are switched off."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.net[0].weight[:2] = 0.25
        self.net[0].weight.data[14] = torch.linspace(0, 1, 8)


class SetsShardedRows(SetsRows):
    def __init__(self):
        super().__init__()
        self.net[0].bias.requires_grad = False  # set by the hook alone, as a teacher's weights

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with armature.whole_weights(self.net):
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.net[0].bias.mul_(0.9)


class StaysInTraining(Regressor):
    """Validates in training mode: BatchNorm uses, and moves, what it measures."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def on_validation_model_eval(self):
        pass

    def on_validation_model_train(self):
        pass


class BuiltInSetup(Regressor):
    """Layers are made in setup(stage), from the data module, as Lightning's page on data has it."""

    def __init__(self):
        super().__init__()
        del self.net

    def setup(self, stage):
        if not hasattr(self, "net"):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class EvalInTraining(Regressor):
    """A part is in eval mode from on_train_start on, and after validation, too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))

    def on_train_start(self):
        self.norm.eval()

    def forward(self, x):
        return self.net(self.norm(x))


HABITS = [
    fsdp(InPlace),
    fsdp(Parametrized, sample=True),
    fsdp(ParameterHooks),
    ddp(EvalInTraining, sample=True),
    ddp(GrowingBuffer, sample=True),
    fsdp(CompiledWrapper),
    ddp(ComplexWeights),
    fsdp(OddParameters),
    ddp(SometimesUsed, also=FIND_UNUSED),
    fsdp(SetsRows, also=WHOLE),
    fsdp(SetsShardedRows),
    replace(ddp(SetsRows, name="SetsRowsOfAnEngine"), layout="zero2"),
    replace(ddp(SetsShardedRows, name="SetsRowsOfZero3"), layout="zero3"),
    fsdp(Penalized, sample=True),
    fsdp(InjectsAdapters),
    ddp(StaysInTraining, data=Vectors),
    fsdp(BuiltInSetup),
]
