"""BatchNorm over the batches of all data ranks, equal to one process with the whole batch; on CPUs
too.

InstanceNorm normalizes each sample by itself; only the running statistics that it may keep are
synchronized.

torch.nn.SyncBatchNorm refuses CPUs. Here each BatchNorm module gets a forward of its own, so that
neither a name nor `type(module)` changes. GPUs run torch's own kernels.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from typing_extensions import override

log = logging.getLogger(__name__)

_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NOT_ALL = (
    "A BatchNorm in training mode reads the batches of all ranks, and some did not call it or have "
    "ended. Call it on "
    "every rank, or in eval() (if it tracks running statistics), or type "
    "strategy.sync_batchnorm=false."
)
GROUP = "_armature_group"
Running = tuple[Tensor, Tensor]  # mean and variance


class _Shared:
    """The ranks whose batches a module reads.

    A copy of the module reads them, too; a pickle holds None.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def forward(self, input: Tensor) -> Tensor:  # self has no type: TorchScript knows no Any
    """Stand in for `forward` of torch's BatchNorms. A pickled method is looked up by this name."""
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]  # what is scripted runs alone
        momentum = 0.0 if self.momentum is None else self.momentum
        training = self.training or self.running_mean is None
        return nn.functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training,
            momentum,
            self.eps,
        )
    shared = vars(self)[GROUP]
    if shared is None or not (self.training or self.running_mean is None):
        return type(self).forward(self, input)
    self._check_input_dim(input)
    tracks = self.training and self.track_running_stats and self.running_mean is not None
    mean, variance = (self.running_mean, self.running_var) if tracks else (None, None)
    weight = _count(self) if tracks else 0.0
    return _batch_norm(
        shared.group, input, mean, variance, self.weight, self.bias, True, weight, self.eps
    )


def own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `forward` of a user's class or of InstanceNorms, and run it."""
    run, shared = type(self).forward, vars(self)[GROUP]
    if shared is None:
        return run(self, *args, **kwargs)
    if isinstance(self, _BatchNorm):
        with _OverRanks(shared.group) as over_ranks:
            output = run(self, *args, **kwargs)
        if self.training and not over_ranks.called:
            _warn_of_own(type(self))
        return output
    output = run(self, *args, **kwargs)
    _share_statistics(self, len(next(iter([*args, *kwargs.values()]))), shared.group)
    return output


own_forward.__name__ = "forward"  # by which a pickled method is looked up


class _OverRanks(TorchFunctionMode):
    """Let `torch.nn.functional.batch_norm` normalize over all ranks, wherever a forward calls
    it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.called = group, False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.called = True
        return _batch_norm(self.group, *args, **(kwargs or {}))


@functools.cache
def _warn_of_own(cls: type[nn.Module]) -> None:
    log.warning(
        "%s.%s did not call torch.nn.functional.batch_norm in training. Statistics that it "
        "computes by itself are of "
        "each rank's own samples, and differ from those of one process: reduce them over the ranks "
        "(self.all_gather), "
        "or call super().forward(input).",
        cls.__module__, cls.__qualname__,
    )  # fmt: skip


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
        return _OnGpu.apply(input, weight, bias, *arguments)  # pyright: ignore[reportReturnType]
    x = input if input.dtype == torch.float64 else input.float()
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    return _Normalize.apply(x, weight, bias, running, eps, momentum, group).to(input.dtype)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def _count(module: Any) -> float:
    """Count a batch, and return its weight in the running statistics."""
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return 1 / float(module.num_batches_tracked)
    return module.momentum or 0.0


def _share_statistics(module: nn.Module, samples: int, group: dist.ProcessGroup) -> None:
    """Combine an InstanceNorm's running statistics: each rank has moved the same ones towards its
    own samples' mean.
    """
    mean, variance = module.running_mean, module.running_var
    if module.training and isinstance(mean, Tensor) and isinstance(variance, Tensor):
        total = (
            torch.cat([mean.double(), variance.double(), mean.new_ones(1, dtype=torch.float64)])
            * samples
        )
        if not samples:  # whose mean is not a number
            total.zero_()
        dist.all_reduce(total, group=group)
        both = total[:-1] / total[-1]
        mean.copy_(both[: len(mean)])
        variance.copy_(both[len(mean) :])


class _Normalize(torch.autograd.Function):
    """Normalize a rank's part x (n, C, …) of a batch, in x's type, by mean and variance of the
    whole batch.

    Means and sums of squared deviations are combined (Chan, Golub and LeVeque 1983), since the
    difference of E[x²] and E[x]² has no correct digit if the mean is much larger than the
    deviation. Ranks may hold unequal numbers of samples.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        running: Running | None,
        eps: float,
        weight: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        dims, count = _all_but_channels(x), x.numel() // x.shape[1]
        # rounded, so deviations from it have a small mean of their own
        shift = x.sum(dims) / max(count, 1)
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
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(x.shape)}"
            )
        mean = (means * counts).sum(0) / total
        variance = (all_squares + counts * (means - mean).square()).sum(0) / total
        if running is not None:
            for tracked, new in zip(running, (mean, variance * (total / (total - 1))), strict=True):
                tracked.lerp_(new.to(tracked.dtype), weight)
        rest = (mean - shift.double()).to(x.dtype)
        deviations -= _broadcast(rest, x)
        inverse = torch.rsqrt(variance + eps).to(x.dtype)
        ctx.save_for_backward(x, shift, rest, inverse, scale)
        ctx.group, ctx.total, ctx.eps = group, total, eps
        y = deviations * _broadcast(inverse if scale is None else inverse * scale, x)
        return y if bias is None else y + _broadcast(bias, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, shift, rest, inverse, scale), needed = (
            gradients,
            ctx.saved_tensors,
            ctx.needs_input_grad[:3],
        )
        if _differentiates_again():
            return (
                *_gradients_of_gradients(x, dy, scale, needed, ctx.eps, ctx.group),
                None,
                None,
                None,
                None,
            )
        deviations = x - _broadcast(shift, x) - _broadcast(rest, x)
        found = _gradients(
            dy,
            deviations,
            inverse,
            scale,
            needed,
            ctx.total,
            functools.partial(_sum, group=ctx.group),
        )
        return *found, None, None, None, None


class _OnGpu(TorchFunction):
    """torch's kernels, whose gradients have none of their own: those of a penalty on gradients are
    written here.
    """

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.eps = args[5]
        return TorchFunction.forward(ctx, *args)

    @staticmethod
    @override
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not _differentiates_again():
            return TorchFunction.backward(ctx, grad_output)
        (x, scale), needed = ctx.saved_tensors[:2], ctx.needs_input_grad[:3]
        return *_gradients_of_gradients(
            x, grad_output, scale, needed, ctx.eps, ctx.process_group
        ), *6 * [None]


def _differentiates_again() -> bool:
    """Return whether a backward is recorded (create_graph=True)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _gradients_of_gradients(
    x: Tensor,
    dy: Tensor,
    scale: Tensor | None,
    needed: tuple[bool, bool, bool],
    eps: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor | None, ...]:
    """Return the gradients as functions of x, dy and scale, over all ranks, for another
    backward.
    """
    values = x if x.dtype == torch.float64 else x.float()
    dims = _all_but_channels(x)

    def all_sum(each: Tensor) -> Tensor:
        return _Sum.apply(each, group)  # pyright: ignore[reportReturnType]

    total = _sum(values.new_tensor(values.numel() // values.shape[1]), group=group)
    deviations = values - _broadcast(all_sum(values.sum(dims)) / total, x)
    variance = all_sum(deviations.square().sum(dims)) / total
    inverse = torch.rsqrt(variance + eps)
    dx, *others = _gradients(
        dy.to(values.dtype), deviations, inverse, scale, needed, total, all_sum
    )
    return None if dx is None else dx.to(x.dtype), *others


def _gradients(
    dy: Tensor,
    deviations: Tensor,
    inverse: Tensor,
    scale: Tensor | None,
    needed: tuple[bool, bool, bool],
    total: Tensor,
    all_sum: Callable[[Tensor], Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the inputs, of the scale and of the bias.

    None for what needs none.
    """
    dims = _all_but_channels(dy)
    sums = torch.stack([dy.sum(dims), (dy * deviations).sum(dims)])
    d_scale = (sums[1] * inverse).to(scale.dtype) if needed[1] and scale is not None else None
    d_bias = sums[0].clone() if needed[2] else None
    if not needed[0]:
        return None, d_scale, d_bias
    mean_dy, mean_product = all_sum(sums) / total
    slope = inverse if scale is None else inverse * scale
    dx = dy - _broadcast(mean_dy, dy) - deviations * _broadcast(mean_product * inverse.square(), dy)
    return dx * _broadcast(slope, dy), d_scale, d_bias


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(values.clone(), group=group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return _Sum.apply(gradients[0], ctx.group), None  # pyright: ignore[reportReturnType]


def _sum(values: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(values, group=group)
    return values


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _broadcast(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (x.ndim - 2))


def synchronize(module: nn.Module, *, group: dist.ProcessGroup | None) -> None:
    """Let every BatchNorm inside use the batches of all ranks of `group`; SyncBatchNorms stay as
    they are.

    InstanceNorms that keep running statistics share these. A module whose forward was replaced is
    named in a warning.
    """
    for name, child in module.named_modules():
        # TorchScript's classes cannot be asked for `forward`
        if not isinstance(child, (_BatchNorm, *_INSTANCE_NORMS)) or isinstance(
            child, nn.SyncBatchNorm
        ):
            continue
        if isinstance(child, _INSTANCE_NORMS) and not child.track_running_stats:
            continue
        cls: Any = type(child)
        mine = vars(child).get("forward")
        known = (None, cls.forward, forward, own_forward)  # an unpickled module holds its class's
        if getattr(mine, "__func__", mine) not in known:
            log.warning(
                "%s: code has replaced the forward of this %s. Statistics that it computes are of "
                "each rank's own "
                "samples, and differ from those of one process: override forward in a class "
                "instead.",
                name, cls.__qualname__,
            )  # fmt: skip
            continue
        plain = isinstance(child, _BatchNorm) and cls.forward is _BatchNorm.forward
        child.__dict__ |= {
            GROUP: _Shared(group),
            "forward": MethodType(forward if plain else own_forward, child),
        }
