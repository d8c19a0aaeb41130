"""BatchNorm over the batches of all data ranks, equal to one process with the whole batch; on CPUs
too, which torch.nn.SyncBatchNorm refuses.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from armature.parallel.functional import Ranks


def synchronize(module: nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """Let every BatchNorm inside use the batches of all ranks of `group`; SyncBatchNorms stay as
    they are.

    Each gets a subclass of its class, of the same name: users' classes call torch's function.
    """
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for child in module.modules():
        # TorchScript's classes cannot be changed
        if isinstance(child, _BatchNorm) and not isinstance(
            child, nn.SyncBatchNorm | torch.jit.ScriptModule
        ):
            cls = type(child)
            if cls not in kinds:
                kinds[cls] = type(
                    cls.__name__, (_OverRanks, cls), {"group": group, "__module__": cls.__module__}
                )
            child.__class__ = kinds[cls]  # pyright: ignore[reportAttributeAccessIssue]


class _OverRanks(nn.Module):
    """Mixed in before a class whose forward calls `torch.nn.functional.batch_norm`."""

    group: ClassVar[dist.ProcessGroup]

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Synchronized(self.group):
            return super().forward(*args, **kwargs)


class _Synchronized(TorchFunctionMode):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.batch_norm:
            return _batch_norm(self.group, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _batch_norm(
    group: dist.ProcessGroup,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute torch.nn.functional.batch_norm over all ranks; its arguments, inputs (B, C, …)."""
    if not training:
        return nn.functional.batch_norm(
            input, running_mean, running_var, weight, bias, False, momentum, eps
        )
    if input.is_cuda:
        arguments = (running_mean, running_var, eps, momentum, group, dist.get_world_size(group))
        return TorchFunction.apply(input, weight, bias, *arguments)  # pyright: ignore[reportReturnType]
    dims, shape = [0, *range(2, input.ndim)], (1, -1, *[1] * (input.ndim - 2))
    x = input.double()  # in which sums over a batch are exact enough
    ranks = Ranks.of(group)
    count = ranks.sum(x.new_tensor(x.numel() // x.shape[1]))
    if count < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    mean = _Sum.apply(x.sum(dims), ranks) / count
    deviations = x - mean.view(shape)
    variance = _Sum.apply(deviations.square().sum(dims), ranks) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = variance * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    y = deviations * torch.rsqrt(variance + eps).view(shape)
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(input.dtype)


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum over ranks, also of a gradient's penalty."""

    @staticmethod
    @override
    def forward(ctx: Any, values: Tensor, ranks: Ranks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks = ranks
        return ranks.sum(values)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Sum.apply(gradient, ctx.ranks), None
