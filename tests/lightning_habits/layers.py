"""Weights and layers in the forms that torch has for them: parametrizations, hooks, sparse and
shared ones.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.lightning_habits.regression import Regressor


class OldWeightNorm(Regressor):
    """torch.nn.utils.weight_norm, which is deprecated and everywhere."""

    def __init__(self):
        super().__init__()
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.net = nn.Sequential(
                nn.utils.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 1)
            )


class NewWeightNorm(Regressor):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 1)
        )


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


class Hooked(Regressor):
    """Forward hooks that collect activations for the loss and change inputs."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        self.net[0].register_forward_hook(self.keep("hidden"))
        self.net[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))

    def keep(self, name):
        def hook(module, args, output):
            self.seen[name] = output

        return hook

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * self.seen.pop("hidden").square().mean()


class GradientHooks(Regressor):
    """Hooks of tensors and of parameters in the backward pass."""

    def __init__(self):
        super().__init__()
        self.net[2].register_full_backward_hook(self.scale)

    def scale(self, module, grad_input, grad_output):
        return tuple(None if grad is None else 0.5 * grad for grad in grad_input)

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: torch.where(grad > 0, grad, 0.5 * grad))
        return self.net[2](hidden)


class ParameterHooks(Regressor):
    """A hook on a parameter, which masks its gradient, as transfer learning of single rows does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", (torch.arange(16) % 2).float().unsqueeze(1))
        self.net[0].weight.register_hook(lambda grad: 0.5 * grad)


class Shared(Regressor):
    """One block that is called several times in a forward, as universal transformers do."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = x + torch.tanh(self.block(x))
        return self.net(x)


class LateBuffers(Regressor):
    """Buffers that setup and on_fit_start register."""

    def setup(self, stage):
        if not hasattr(self, "offset"):
            self.register_buffer("offset", torch.linspace(-0.1, 0.1, 8))

    def on_fit_start(self):
        if not hasattr(self, "moving"):
            self.register_buffer("moving", torch.zeros(8, device=self.device))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.moving.lerp_(self.all_gather(x.mean(0)).reshape(-1, 8).mean(0), 0.1)
        return super().training_step((x - self.moving, y), batch_idx)

    def forward(self, x):
        return self.net(x + self.offset)


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


class GrowingBufferLoads(GrowingBuffer):
    """The same with the usual remedy: the buffer takes the checkpoint's shape before it is
    loaded.
    """

    def on_load_checkpoint(self, checkpoint):
        self.memory = torch.zeros_like(checkpoint["state_dict"]["memory"])


class Sparse(Regressor):
    """A sparse embedding, trained by SparseAdam, beside a dense optimizer."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.table = nn.Embedding(10, 8, sparse=True)

    def forward(self, x):
        return self.net(x + self.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))

    def training_step(self, batch, batch_idx):
        dense, sparse = self.optimizers()
        loss = self.shared_step(batch, "train")
        dense.zero_grad()
        sparse.zero_grad()
        self.manual_backward(loss)
        dense.step()
        sparse.step()

    def configure_optimizers(self):
        return self.sgd(), torch.optim.SparseAdam(list(self.table.parameters()), lr=0.01)

    def sgd(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


class SparseOverBatches(Sparse):
    """The same, with a step for two batches: a stop between them leaves a sparse gradient."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.shared_step(batch, "train"))
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class SparseAutomatically(Sparse):
    """One optimizer, and clipping, for sparse and dense gradients."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Factorized(Regressor):
    """Sparse embeddings of users and items alone, trained by SparseAdam, as in matrix
    factorization.
    """

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(8, 4, sparse=True), nn.Embedding(8, 4, sparse=True)
        self.net = nn.Identity()

    def forward(self, x):
        bits = (x > 0).long() * torch.tensor([1, 2, 4, 0, 1, 2, 4, 0], device=x.device)
        return (self.users(bits[:, :4].sum(1)) * self.items(bits[:, 4:].sum(1))).sum(
            1, keepdim=True
        )

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.parameters(), lr=0.01)


class Embeddings(Regressor):
    """padding_idx, and EmbeddingBag with offsets."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(12, 8, mode="mean")

    def forward(self, x):
        index = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        offsets = 2 * torch.arange(len(x), device=x.device)
        bags = self.bag(torch.stack([index, index + 4], dim=1).flatten(), offsets)
        return self.net(x + self.table(index) + bags)


class MaxNorm(Regressor):
    """An embedding with max_norm, which changes its weight in the forward pass."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8, max_norm=0.5)

    def forward(self, x):
        return self.net(x + self.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()))


class Averaged(Regressor):
    """torch's AveragedModel inside the module, which validates the average."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_before_zero_grad(self, optimizer):
        self.average.update_parameters(self.net)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.mse_loss(self.average(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


class SwapsWeights(Regressor):
    """Swaps averaged weights in for validation, and the trained ones back after it."""

    def __init__(self):
        super().__init__()
        self.average = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(
            False
        )
        self.average.load_state_dict(self.net.state_dict())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.2)

    def swap(self):
        for slow, fast in zip(self.average.parameters(), self.net.parameters(), strict=True):
            kept = fast.detach().clone()
            fast.data.copy_(slow.data)
            slow.data.copy_(kept)

    def on_validation_epoch_start(self):
        self.swap()

    def on_validation_epoch_end(self):
        self.swap()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


class HiddenTeacher(Regressor):
    """A teacher that is hidden from Lightning in a list: in no state dict, made the same by each
    start.
    """

    def __init__(self):
        super().__init__()
        teacher = nn.Linear(8, 1)
        with torch.no_grad():
            teacher.weight.copy_(torch.linspace(-1, 1, 8).reshape(1, 8))
            teacher.bias.fill_(0.1)
        self.teacher = [teacher.eval()]

    def training_step(self, batch, batch_idx):
        x, _ = batch
        with torch.no_grad():
            wanted = self.teacher[0].to(self.device)(x)
        return super().training_step(batch, batch_idx) + F.mse_loss(self(x), wanted)


class Compiled(Regressor):
    """A submodule that is compiled in place, by a backend that compiles nothing."""

    def __init__(self):
        super().__init__()
        self.net.compile(backend="eager")


class CompiledWrapper(Regressor):
    """torch.compile in configure_model: names begin with _orig_mod."""

    def __init__(self):
        super().__init__()
        self.built = False

    def configure_model(self):
        if not self.built:
            self.net, self.built = torch.compile(self.net, backend="eager"), True


class Transformer(Regressor):
    """nn.Transformer with masks, and nn.TransformerEncoder, whose fast path differs in eval."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.query = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x):
        tokens = torch.cat(
            [self.query.expand(len(x), 1, 8), x.unsqueeze(1), x.flip(1).unsqueeze(1)], dim=1
        )
        mask = nn.Transformer.generate_square_subsequent_mask(3, device=x.device)
        return self.net(self.encoder(tokens, mask=mask.T)[:, 0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ChannelsLast(Regressor):
    """Weights in another memory format, and a complex parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        image = torch.outer(torch.ones(2, device=x.device), torch.ones(4, device=x.device)).expand(
            len(x), 1, 2, 4
        )
        image = (image * x.view(len(x), 1, 2, 4)).contiguous(memory_format=torch.channels_last)
        return self.net(self.mix(F.avg_pool2d(self.conv(image), 1, 2).flatten(1)))


class ComplexWeights(Regressor):
    """A Fourier layer: complex weights."""

    def __init__(self):
        super().__init__()
        self.spectrum = nn.Parameter(torch.complex(torch.ones(5), torch.zeros(5)))

    def forward(self, x):
        return self.net(torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=8))


class Routed(Regressor):
    """Two experts, of which a batch may leave out one on some ranks; their outputs are weighted."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gate = nn.Linear(8, 2)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return self.net(
            sum(
                w.unsqueeze(1) * expert(x)
                for w, expert in zip(weights.T, self.experts, strict=True)
            )
        )


class ExtraStateNet(nn.Linear):
    """get_extra_state and set_extra_state, and a state dict hook that adds a version."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * (1 + 0.01 * self.calls)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class ExtraStates(Regressor):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(ExtraStateNet(8, 16), nn.Tanh(), nn.Linear(16, 1))


class BatchNorms(Regressor):
    """BatchNorm without affine weights, with a cumulative mean, and LayerNorm without bias."""

    def __init__(self):
        super().__init__()
        self.norms = nn.Sequential(
            nn.BatchNorm1d(8, affine=False, momentum=None),
            nn.Linear(8, 8),
            nn.LayerNorm(8, bias=False),
        )

    def forward(self, x):
        return self.net(self.norms(x))
