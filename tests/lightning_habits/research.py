"""Idioms of research code: codebooks, adversaries, weights that are changed by hand."""

import math

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.lightning_habits.regression import Manual, Regressor


def mean_over_ranks(value):
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value


# ---------------------------------------------------------------- weights that are set by hand
class ActNorm(nn.Module):
    """Glow's normalization: the first batch decides shift and scale, which are trained from there
    on.
    """

    def __init__(self, width: int, everywhere: bool):
        super().__init__()
        self.everywhere = everywhere
        self.shift, self.scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    @torch.no_grad()
    def initialize(self, x):
        mean, square = x.mean(0), x.square().mean(0)
        if self.everywhere:
            mean, square = mean_over_ranks(mean), mean_over_ranks(square)
        self.shift.data.copy_(-mean)
        self.scale.data.copy_(1 / ((square - mean.square()).sqrt() + 1e-6))
        self.initialized.fill_(1)

    def forward(self, x):
        if self.training and self.initialized.item() == 0:
            self.initialize(x)
        return self.scale * (x + self.shift)


class Glow(Regressor):
    def __init__(self, everywhere: bool = True):
        super().__init__()
        self.norm = ActNorm(8, everywhere)

    def forward(self, x):
        return self.net(self.norm(x))


class GlowInside(Regressor):
    """The normalization is inside of the network, whose forward is sharded."""

    def __init__(self, everywhere: bool = True):
        super().__init__()
        self.net = nn.Sequential(
            ActNorm(8, everywhere), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)
        )


class Langevin(Regressor):
    """Noise is added to the weights after each step (SGLD)."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.01 * torch.randn_like(p))


class DrawnAtStart(Regressor):
    """The last layer is drawn anew in on_fit_start."""

    def on_fit_start(self):
        self.net[2].reset_parameters()


class DrawnAtTrainStart(Regressor):
    def on_train_start(self):
        nn.init.normal_(self.net[2].weight, std=0.1)


class DualAscent(Regressor):
    """A multiplier that follows how much a constraint is violated by this rank's samples."""

    def __init__(self):
        super().__init__()
        self.multiplier = nn.Parameter(torch.tensor(0.1))

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        violation = (out.mean() - 0.1).abs()
        with torch.no_grad():
            self.multiplier += 0.1 * violation
        return F.mse_loss(out, batch[1]) + self.multiplier.detach() * violation

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


class RevivesUnits(Regressor):
    """At the end of an epoch, units that contribute least are drawn anew."""

    def on_train_epoch_end(self):
        with torch.no_grad():
            weight = self.net[0].weight
            weight[:2] = 0.1 * torch.randn(2, 8)


class KMeansAtStart(Regressor):
    """Centers are the first samples of the training data."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.zeros(4, 8))

    def on_train_start(self):
        x, _ = next(iter(self.trainer.datamodule.train_dataloader()))
        self.centers.copy_(x[:4])

    def forward(self, x):
        return self.net(x + self.centers[torch.cdist(x, self.centers).argmin(1)])


# ---------------------------------------------------------------- codebooks
class Codebook(L.LightningModule):
    """A codebook that moves by averages of this rank's samples; unused codes restart at random
    samples.
    """

    def __init__(self, codes: int = 16, weight: bool = False):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        codebook = torch.sin(torch.arange(4.0 * codes)).reshape(codes, 4)
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", codebook.clone())
        if weight:
            self.codebook = nn.Parameter(codebook, requires_grad=False)
        else:
            self.register_buffer("codebook", codebook)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        z = self.encoder(x)
        index = torch.cdist(z.detach(), self.codebook.detach()).argmin(1)
        quantized = self.codebook[index]
        loss = F.mse_loss(self.decoder(z + (quantized - z).detach()), x) + 0.25 * F.mse_loss(
            z, quantized.detach()
        )
        with torch.no_grad():
            hot = F.one_hot(index, len(self.counts)).float()
            self.counts.mul_(0.8).add_(hot.sum(0), alpha=0.2)
            self.sums.mul_(0.8).add_(hot.T @ z, alpha=0.2)
            self.codebook.data.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))
            dead = self.counts < 0.3
            fresh = z[torch.randint(len(z), (len(self.counts),))]
            self.codebook.data[dead] = fresh[dead]
            self.sums[dead], self.counts[dead] = fresh[dead], 1.0
        self.log("vq", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


# ---------------------------------------------------------------- gradients
class AdaptiveWeight(Regressor):
    """VQGAN's balance of two losses by their gradients at the last layer."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        one, two = F.mse_loss(out, y), out.abs().mean()
        last = self.net[2].weight
        first = torch.autograd.grad(one, last, retain_graph=True)[0]
        second = torch.autograd.grad(two, last, retain_graph=True)[0]
        weight = (first.norm() / (second.norm() + 1e-4)).clamp(0, 10).detach()
        self.log("weight", weight, sync_dist=True)
        return one + 0.1 * weight * two


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.alpha * grad, None


class Adversary(Regressor):
    """Domain-adversarial training: a gradient is reversed, more so as the training proceeds."""

    def __init__(self):
        super().__init__()
        self.domain = nn.Linear(16, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        progress = (batch_idx + self.current_epoch * self.trainer.num_training_batches) / (
            self.trainer.max_epochs * self.trainer.num_training_batches
        )
        alpha = 2.0 / (1.0 + math.exp(-10 * progress)) - 1
        features = self.net[1](self.net[0](x))
        domain = F.cross_entropy(self.domain(Reverse.apply(features, alpha)), (x[:, 0] > 0).long())
        self.log_dict({"alpha": alpha, "domain": domain}, sync_dist=True)
        return F.mse_loss(self.net[2](features), y) + domain


class AdaptiveClipping(Regressor):
    """Gradients are clipped by the norm of each unit's weights (NFNets)."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            if p.grad is None or p.ndim < 2:
                continue
            largest = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.02
            norm = p.grad.detach().norm(dim=1, keepdim=True).clamp(min=1e-6)
            p.grad.detach().copy_(torch.where(norm > largest, p.grad * (largest / norm), p.grad))


class Ensemble(Regressor):
    """Four members, stacked along a new dimension and computed at once by vmap."""

    def __init__(self):
        super().__init__()
        members = [nn.Linear(8, 1) for _ in range(4)]
        params, _ = torch.func.stack_module_state(members)
        self.weight, self.bias = (
            nn.Parameter(params[name].detach()) for name in ("weight", "bias")
        )
        self.base = [nn.Linear(8, 1, device="meta")]

    def forward(self, x):
        def member(weight, bias):
            return torch.func.functional_call(self.base[0], {"weight": weight, "bias": bias}, (x,))

        return self.net(x) + torch.func.vmap(member)(self.weight, self.bias).mean(0)


class LazyPenalty(Manual):
    """R1: a penalty of the gradients of inputs with every third batch, in a step of its own."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        opt = self.optimizers()
        loss = self.shared_step(batch, "train")
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        if batch_idx % 3 == 0:
            x = x.detach().requires_grad_(True)
            (grads,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            penalty = grads.square().sum(1).mean()
            opt.zero_grad()
            self.manual_backward(0.5 * penalty)
            opt.step()
            self.log("penalty", penalty, sync_dist=True)
