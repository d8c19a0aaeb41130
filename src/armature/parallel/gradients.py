"""The gradient norm, and clipping, of a model that is divided over any mesh: equal to the undivided model's.

torch's own clip_grad_norm_ refuses gradients on different meshes. Here each rank squares what it holds, divided by the
number of ranks that hold the same, and one all-reduce of one number adds it up, whatever the layout.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_PIECE = 1 << 15  # elements


def local_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """This rank's part of each gradient, and into how many parts the gradient is cut."""
    parts = []
    for param in parameters:
        grad = param.grad
        if isinstance(grad, DTensor):
            if any(placement.is_partial() for placement in grad.placements):
                # sequence parallelism leaves the norms' gradients as sums that are still to be made
                whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
                param.grad = grad = grad.redistribute(placements=whole)
            cuts = (grad.device_mesh.size(i) for i, p in enumerate(grad.placements) if not p.is_replicate())
            parts.append((grad.to_local(), math.prod(cuts)))
        elif grad is not None:
            parts.append((grad, 1))
    return parts


@torch.no_grad()
def total_norm(parts: list[tuple[Tensor, int]], *, ranks: int, divided: bool, device: torch.device) -> Tensor:
    """The 2-norm of the undivided model's gradient, a 0-dim fp32 tensor, the same on every rank.

    Args:
        parts: from `local_gradients`.
        ranks: how many ranks hold this rank's pipeline stage among them.
        divided: whether ranks hold different parts, so that they have to add up. The same on every rank.
        device: where the collective works.
    """
    cut = [piece for part in parts for piece in pieces(*part)]
    if cut:
        norms = torch._foreach_norm([part for part, _ in cut], 2, dtype=torch.float32)
        squares = torch.stack([norm.to(device) for norm in norms]).square()
        if divided:
            squares *= torch.tensor([cuts / ranks for _, cuts in cut], device=device)
        total = squares.sum()
    else:
        total = torch.zeros((), device=device)
    if divided:
        dist.all_reduce(total)
    return total.sqrt()


def pieces(part: Tensor, cuts: int) -> list[tuple[Tensor, int]]:
    """A CPU adds squares up one after the other in fp32: over millions of elements, the fifth digit is wrong."""
    if part.device.type != "cpu" or part.numel() <= _PIECE or not part.is_contiguous():
        return [(part, cuts)]
    return [(piece, cuts) for piece in part.view(-1).split(_PIECE)]


@torch.no_grad()
def multiply(parts: list[tuple[Tensor, int]], *, by: Tensor) -> None:
    """Multiply all gradients by a number, 0-dim."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for part, _ in parts:
        by_device.setdefault(part.device, []).append(part)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, by.to(device))


@torch.no_grad()
def clip_by_value(parts: list[tuple[Tensor, int]], *, value: float) -> None:
    """Clamp each element of each gradient to [-value, value]."""
    if parts:
        torch._foreach_clamp_min_([part for part, _ in parts], -value)
        torch._foreach_clamp_max_([part for part, _ in parts], value)
