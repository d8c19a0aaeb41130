"""Norms of parts of a model that is divided over any mesh, equal to the undivided model's."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from armature.parallel.gradients import local_gradients, pieces

__all__ = ["local_gradients", "local_parts", "norms"]


def local_parts(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """This rank's part of each tensor, and into how many parts it is cut; as `gradients.local_gradients`."""
    parts = []
    for tensor in tensors:
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            cuts = (tensor.device_mesh.size(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())
            parts.append((tensor.to_local(), math.prod(cuts)))
        else:
            parts.append((tensor, 1))
    return parts


@torch.no_grad()
def norms(
    parts: list[tuple[Tensor, int]], groups: list[int], *, count: int, ranks: int, divided: bool, device: torch.device
) -> Tensor:
    """The 2-norm of each group of undivided tensors, (count + 1,) in fp32, the same on every rank; the last is of all.

    Args:
        parts: from `local_parts`.
        groups: which group each of them belongs to.
        ranks, divided: as for `gradients.total_norm`.
    """
    squares = torch.zeros(count, device=device)
    cut, owners = [], []
    for (part, cuts), group in zip(parts, groups, strict=True):
        for piece in pieces(part, cuts):
            cut.append(piece)
            owners.append(group)
    if cut:
        each = torch._foreach_norm([part for part, _ in cut], 2, dtype=torch.float32)
        each = torch.stack([norm.to(device) for norm in each]).square()
        if divided:
            each *= torch.tensor([cuts / ranks for _, cuts in cut], device=device)
        squares.index_add_(0, torch.tensor(owners, device=device), each)
    if divided:
        dist.all_reduce(squares)
    return torch.cat([squares, squares.sum()[None]]).sqrt()
