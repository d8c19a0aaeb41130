"""BatchNorm over the batches of all data ranks, equal to one process with the whole batch; on CPUs too.

InstanceNorm normalizes each sample by itself; only the running statistics that it may keep are synchronized.

torch.nn.SyncBatchNorm refuses CPUs. Here the class of each BatchNorm module is replaced by a subclass of that class, so
that no name changes and `isinstance(module, nn.BatchNorm2d)` stays true. GPUs run torch's own kernels.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
Running = tuple[Tensor, Tensor]  # mean and variance


class _Synchronized(nn.Module):
    """What stands in for a class. A pickled module is one of the original class, for any process."""

    group: ClassVar[dist.ProcessGroup]  # of the class: a group can be neither copied nor pickled
    original: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (self.original,), self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> _Synchronized:
        twin = memo[id(self)] = self.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class SynchronizedBatchNorm(_Synchronized, _BatchNorm):
    """BatchNorm of inputs (B, C, …) over all ranks of `group`. Evaluation with tracked statistics is torch's own."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        running, weight = None, 0.0
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            running, weight = (self.running_mean, self.running_var), self._count()
        if input.is_cuda:
            mean, variance = running or (None, None)
            arguments = (mean, variance, self.eps, weight, self.group, dist.get_world_size(self.group))
            return TorchFunction.apply(input, self.weight, self.bias, *arguments)  # pyright: ignore[reportReturnType]
        x = input if input.dtype == torch.float64 else input.float()
        return _Normalize.apply(x, self.weight, self.bias, running, self.eps, weight, self.group).to(input.dtype)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def _count(self) -> float:
        """Count a batch, and return its weight in the running statistics."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1 / float(self.num_batches_tracked)
        return self.momentum or 0.0


class SynchronizedInstanceNorm(_Synchronized):
    """InstanceNorm whose running statistics are those of all ranks' samples."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        mean, variance = self.running_mean, self.running_var
        if self.training and isinstance(mean, Tensor) and isinstance(variance, Tensor):
            # each rank has moved the same statistics towards the mean over its own samples
            total = torch.cat([mean.double(), variance.double(), mean.new_ones(1, dtype=torch.float64)]) * len(input)
            dist.all_reduce(total, group=self.group)
            both = total[:-1] / total[-1]
            mean.copy_(both[: len(mean)])
            variance.copy_(both[len(mean) :])
        return output


class _Normalize(torch.autograd.Function):
    """Normalize a rank's part x (n, C, …) of a batch, in x's type, by mean and variance of the whole batch.

    Means and sums of squared deviations are combined (Chan, Golub and LeVeque 1983), since the difference of E[x²] and
    E[x]² has no correct digit if the mean is much larger than the deviation. Ranks may hold unequal numbers of samples.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, running: Running | None, eps: float,
        weight: float, group: dist.ProcessGroup,
    ) -> Tensor:  # fmt: skip
        dims, count = _all_but_channels(x), x.numel() // x.shape[1]
        shift = x.sum(dims) / max(count, 1)  # rounded, so deviations from it have a small mean of their own
        deviations = x - _broadcast(shift, x)
        rest = deviations.sum(dims).double() / max(count, 1)
        squares = deviations.square().sum(dims).double() - count * rest.square()
        own = torch.cat([shift.double() + rest, squares, squares.new_full((1,), count)])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
        means, all_squares, counts = torch.stack(gathered).split([x.shape[1], x.shape[1], 1], dim=1)
        total = counts.sum()
        if count < 2 and total < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
        mean = (means * counts).sum(0) / total
        variance = (all_squares + counts * (means - mean).square()).sum(0) / total
        if running is not None:
            for tracked, new in zip(running, (mean, variance * (total / (total - 1))), strict=True):
                tracked.lerp_(new.to(tracked.dtype), weight)
        deviations -= _broadcast((mean - shift.double()).to(x.dtype), x)
        inverse = torch.rsqrt(variance + eps).to(x.dtype)
        ctx.save_for_backward(deviations, inverse, scale)
        ctx.has_bias, ctx.group, ctx.total = bias is not None, group, total
        y = deviations * _broadcast(inverse if scale is None else inverse * scale, x)
        return y if bias is None else y + _broadcast(bias, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (deviations, inverse, scale) = gradients, ctx.saved_tensors
        dims = _all_but_channels(dy)
        sums = torch.stack([dy.sum(dims), (dy * deviations).sum(dims)])
        d_scale = None if scale is None else (sums[1] * inverse).to(scale.dtype)
        d_bias = sums[0].clone() if ctx.has_bias else None
        dx = None
        if ctx.needs_input_grad[0]:
            dist.all_reduce(sums, group=ctx.group)
            mean_dy, mean_product = sums / ctx.total
            slope = inverse if scale is None else inverse * scale
            dx = dy - _broadcast(mean_dy, dy) - deviations * _broadcast(mean_product * inverse.square(), dy)
            dx *= _broadcast(slope, dy)
        return dx, d_scale, d_bias, None, None, None, None


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _broadcast(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))


def synchronize(module: nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """Let every BatchNorm inside use the batches of all ranks of `group`; SyncBatchNorms stay as they are.

    InstanceNorms that keep running statistics share these.

    Raises:
        ValueError: if a class computes BatchNorm by its own calls, which cannot be synchronized.
    """
    classes: dict[type, type] = {}
    for name, child in module.named_modules():
        if isinstance(child, _INSTANCE_NORMS) and child.track_running_stats and not isinstance(child, _Synchronized):
            cls: Any = type(child)
            names = {"group": group, "original": cls}
            child.__class__ = classes.setdefault(cls, type(cls.__name__, (SynchronizedInstanceNorm, cls), names))
        if isinstance(child, _BatchNorm) and not isinstance(child, (SynchronizedBatchNorm, nn.SyncBatchNorm)):
            cls: Any = type(child)
            if cls not in classes:
                _check_forward(cls, name)
                # behind the child's class: a forward of its own, with a call of super().forward, remains in use
                classes[cls] = type(cls.__name__, (cls, SynchronizedBatchNorm), {"group": group, "original": cls})
            child.__class__ = classes[cls]


def _check_forward(cls: type[nn.Module], name: str) -> None:
    code = getattr(cls.forward, "__code__", None)
    if cls.forward is not _BatchNorm.forward and "batch_norm" in getattr(code, "co_names", ()):
        raise ValueError(
            f"{name} ({cls.__module__}.{cls.__qualname__}) calls batch_norm itself, so its statistics cannot be those "
            "of all ranks' batches. Type strategy.sync_batchnorm=false, or call super().forward(input) in its forward."
        )
