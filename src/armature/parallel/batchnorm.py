"""BatchNorm over the batches of all data ranks, equal to one process with the whole batch; on CPUs too.

InstanceNorm normalizes each sample by itself; only the running statistics that it may keep are synchronized.

torch.nn.SyncBatchNorm refuses CPUs. Here each BatchNorm module gets a forward of its own, so that neither a name nor
`type(module)` changes. GPUs run torch's own kernels.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NOT_ALL = (
    "A BatchNorm in training mode reads the batches of all ranks, and some did not call it or have ended. Call it on "
    "every rank, or in eval(), or type strategy.sync_batchnorm=false."
)
GROUP = "_armature_group"
Running = tuple[Tensor, Tensor]  # mean and variance


class _Shared:
    """The ranks whose batches a module reads. A copy of the module reads them, too; a pickle holds None."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


class SynchronizedBatchNorm(_BatchNorm):
    """Stands in for a class with a forward of its own, which calls this one by super().

    A pickled module is one of the original class, for any process.
    """

    group: ClassVar[dist.ProcessGroup]  # of the class: a group can be neither copied nor pickled
    original: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (self.original,), self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> SynchronizedBatchNorm:
        twin = memo[id(self)] = self.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @override
    def forward(self, input: Tensor) -> Tensor:
        return _over_ranks(self, input, self.group)


def forward(self: Any, input: Tensor) -> Tensor:
    """Stand in for `forward` of a BatchNorm or InstanceNorm. A pickled method is looked up by this name."""
    shared = vars(self)[GROUP]
    if shared is not None and isinstance(self, _BatchNorm):
        return _over_ranks(self, input, shared.group)
    output = type(self).forward(self, input)
    if shared is not None:
        _share_statistics(self, len(input), shared.group)
    return output


def _over_ranks(module: _BatchNorm, input: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return inputs (B, C, …) normalized over all ranks. Evaluation with tracked statistics is torch's own."""
    if not module.training and module.running_mean is not None:
        return _BatchNorm.forward(module, input)
    module._check_input_dim(input)
    running, weight = None, 0.0
    if module.training and module.track_running_stats and module.running_mean is not None:
        assert module.running_var is not None
        running, weight = (module.running_mean, module.running_var), _count(module)
    if input.is_cuda:
        mean, variance = running or (None, None)
        arguments = (mean, variance, module.eps, weight, group, dist.get_world_size(group))
        return TorchFunction.apply(input, module.weight, module.bias, *arguments)  # pyright: ignore[reportReturnType]
    x = input if input.dtype == torch.float64 else input.float()
    return _Normalize.apply(x, module.weight, module.bias, running, module.eps, weight, group).to(input.dtype)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def _count(module: _BatchNorm) -> float:
    """Count a batch, and return its weight in the running statistics."""
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return 1 / float(module.num_batches_tracked)
    return module.momentum or 0.0


def _share_statistics(module: nn.Module, samples: int, group: dist.ProcessGroup) -> None:
    """Combine an InstanceNorm's running statistics: each rank has moved the same ones towards its own samples' mean."""
    mean, variance = module.running_mean, module.running_var
    if module.training and isinstance(mean, Tensor) and isinstance(variance, Tensor):
        total = torch.cat([mean.double(), variance.double(), mean.new_ones(1, dtype=torch.float64)]) * samples
        dist.all_reduce(total, group=group)
        both = total[:-1] / total[-1]
        mean.copy_(both[: len(mean)])
        variance.copy_(both[len(mean) :])


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
        try:
            dist.all_gather(gathered, own, group=group)
        except RuntimeError as error:
            raise RuntimeError(f"{NOT_ALL} torch reports: {error}") from error
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
        cls: Any = type(child)
        if not isinstance(child, (_BatchNorm, *_INSTANCE_NORMS)):  # TorchScript's classes cannot be asked for `forward`
            continue
        own = getattr(vars(child).get("forward"), "__func__", cls.forward)  # an unpickled one has its class's
        if own not in (forward, cls.forward) or isinstance(child, (SynchronizedBatchNorm, nn.SyncBatchNorm)):
            continue
        if (isinstance(child, _INSTANCE_NORMS) and child.track_running_stats) or (
            isinstance(child, _BatchNorm) and cls.forward is _BatchNorm.forward
        ):
            child.__dict__ |= {GROUP: _Shared(group), "forward": MethodType(forward, child)}
        elif isinstance(child, _BatchNorm):
            if cls not in classes:
                _check_forward(cls, name)
                classes[cls] = type(cls.__name__, (cls, SynchronizedBatchNorm), {"group": group, "original": cls})
            child.__class__ = classes[cls]


def _check_forward(cls: type[nn.Module], name: str) -> None:
    code = getattr(cls.forward, "__code__", None)
    if "batch_norm" in getattr(code, "co_names", ()):
        raise ValueError(
            f"{name} ({cls.__module__}.{cls.__qualname__}) calls batch_norm itself, so its statistics cannot be those "
            "of all ranks' batches. Type strategy.sync_batchnorm=false, or call super().forward(input) in its forward."
        )
