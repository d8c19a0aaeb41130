"""The expert axis: each rank holds some of a mixture's experts, and tokens travel to them and back.

Its ranks are those of the shard and tensor axes (and of the context axis): the processes do not
become more. The ranks that hold the same experts (`rest`) shard their weights (FSDP2).

Shapes: M rows that leave this rank, D width, E experts, R ranks of the axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from armature.errors import ConfigError
from armature.models.permutation import permute
from armature.parallel import mesh as meshes
from armature.parallel.tensor import LocalWeights, Weight


def shard(experts: nn.Module, mesh: DeviceMesh, *, loss_ranks: int, **arguments: Any) -> None:
    """Spread experts over `mesh`'s axes expert, rest and replicate, before anything around them is
    sharded.

    Args:
        experts: called with rows sorted by expert (M, D) and the number of each expert's rows (E,).
        loss_ranks: ranks that have a loss of their own, over which gradients are averaged. Those of
            the tensor axis have other tokens of the same loss.
        arguments: of fully_shard.
    """
    axis, rest = mesh["expert"], mesh["rest"]
    count = next(experts.parameters()).shape[0]
    if count % axis.size():
        raise ConfigError(
            f"strategy.expert={axis.size()} does not divide the model's {count} experts. Type a "
            "divisor."
        )
    own = [*experts.named_parameters()]
    for name, param in own:
        distributed = distribute_tensor(param, axis, [Shard(0)], src_data_rank=None)
        experts.register_parameter(
            name, nn.Parameter(distributed, requires_grad=param.requires_grad)
        )
    LocalWeights(axis, [Weight(experts, name, Shard(0)) for name, _ in own]).around(experts)
    if axis.size() > 1:
        _exchange_rows(experts, axis)
    # each rank's experts, or a part of each
    dim = 0 if count % (axis.size() * rest.size()) == 0 else 1
    data_mesh = meshes.data_mesh(mesh, shard="rest")
    fully_shard(experts, mesh=data_mesh, shard_placement_fn=lambda _: Shard(dim), **arguments)
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(loss_ranks))
    # torch 2.13: without it a factor needs NCCL's PREMUL_SUM; with it, a group of one rank would
    # divide twice
    experts.set_force_sum_reduction_for_comms(rest.size() > 1)
    experts.register_forward_hook(reshard_without_grad)


def reshard_without_grad(module: Any, *_: Any) -> None:
    """Forward hook of a unit: no backward follows, and the next forward would use the weights of
    this one.
    """
    if not torch.is_grad_enabled():
        module.reshard()


def _exchange_rows(experts: nn.Module, axis: DeviceMesh) -> None:
    """Let each rank compute the rows of all ranks that belong to its experts.

    What is returned may still travel: what the model computes before it uses it (a shared expert)
    takes no time of its own.
    """
    group, ranks, compute = axis.get_group(), axis.size(), experts.forward

    def forward(x_MD: Tensor, count_E: Tensor) -> Tensor:
        arriving_RE, sent, received = _Pass.kept(partial(_counts, x_MD, count_E, group))
        x_MD = exchange(x_MD, group, received=received, sent=sent)  # sorted by rank, then by expert
        number_E = torch.arange(arriving_RE.shape[1], device=x_MD.device)
        expert_M = number_E.repeat(ranks).repeat_interleave(
            arriving_RE.flatten(), output_size=sum(received)
        )
        order_M = expert_M.argsort(stable=True)
        y_MD = compute(permute(x_MD, order_M), arriving_RE.sum(0))
        return exchange(permute(y_MD, order_M.argsort()), group, received=sent, sent=received)

    experts.forward = forward


def _counts(
    x_MD: Tensor, count_E: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, list[int], list[int]]:
    """Return how many rows arrive from each rank for each expert here (R, E), and `row_lengths`."""
    leaving_RE = count_E.view(group.size(), -1)
    arriving_RE = exchange(count_E, group).view_as(leaving_RE)
    return arriving_RE, *row_lengths(x_MD, leaving_RE, arriving_RE)


def row_lengths(
    x_MD: Tensor, leaving_RE: Tensor, arriving_RE: Tensor
) -> tuple[list[int], list[int]]:
    """Return how many rows this rank sends to each rank, and receives from each.

    Waits for the device.
    """
    sent, received = torch.stack([leaving_RE.sum(1), arriving_RE.sum(1)]).tolist()
    return sent, received


def exchange(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> Tensor:
    """Send x's rows to the ranks in turn, in equal parts or `sent` of them. Differentiable.

    The first use of what is received waits for it.
    """
    return all_to_all_single_autograd(x.contiguous(), received, sent, group)


class _Pass:
    """A block's forward pass, or its recomputation, which takes the counts of the pass again.

    Another exchange, and the host's wait for it, would bring the same. It is entered once per
    repetition: of a backward in two parts there are several.
    """

    running: ClassVar["_Pass | None"] = None

    def __init__(self, counts: list[Any], *, again: bool) -> None:
        self.counts, self.again = counts, again

    def __enter__(self) -> None:
        self._before, self._left, _Pass.running = _Pass.running, iter(self.counts), self

    def __exit__(self, *_: object) -> None:
        _Pass.running = self._before

    @classmethod
    def kept(cls, count: Callable[[], Any]) -> Any:
        if (running := cls.running) is None:
            return count()
        if not running.again:
            running.counts.append(count())
            return running.counts[-1]
        return next(running._left)


def counted_passes() -> tuple[_Pass, _Pass]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    counts: list[Any] = []
    return _Pass(counts, again=False), _Pass(counts, again=True)
