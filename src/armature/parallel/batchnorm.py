"""BatchNorm over the batches of all data ranks, equal to one process with the whole batch; on CPUs too.

torch.nn.SyncBatchNorm refuses CPUs. Here the class of each BatchNorm module is swapped, so that no name changes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


class SynchronizedBatchNorm(_BatchNorm):
    """BatchNorm of inputs (B, C, …) over all ranks of `group`. Evaluation with tracked statistics is torch's own."""

    group: dist.ProcessGroup

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape with channels in dim 1."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        x, channels = input.float(), input.shape[1]
        dims = [0, *range(2, x.ndim)]
        count = torch.full_like(x[:1].flatten()[:1], x.numel() / channels)
        sums = all_reduce(torch.cat([x.sum(dims), x.square().sum(dims), count]), group=self.group)
        total = sums[-1].detach()
        mean, square = sums[:channels] / total, sums[channels:-1] / total
        variance = (square - mean.square()).clamp(min=0)
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), variance.detach() * total / (total - 1))
        shape = [1, channels, *[1] * (x.ndim - 2)]
        y = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(new.to(running.dtype), weight)


def synchronize(module: nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """Let every BatchNorm inside use the batches of all ranks of `group`; SyncBatchNorms stay as they are."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and not isinstance(child, (SynchronizedBatchNorm, nn.SyncBatchNorm)):
            child.__class__ = type(type(child).__name__, (SynchronizedBatchNorm,), {"group": group})


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of ranks with different samples and the same stage and part of the tensor axis."""
    return mesh["replicate", "shard"]._flatten("data").get_group()
