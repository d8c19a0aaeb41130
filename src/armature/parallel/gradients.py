"""Norms, scaling and clipping of tensors that are sharded over any mesh, equal to those of the
unsharded model.

torch's own clip_grad_norm_ refuses gradients on different meshes. Here each rank squares the part
that it holds and divides by the number of ranks that hold the same part, and one all-reduce of a
small tensor adds the squares up, whatever the layout.
"""

# pyright: reportPrivateImportUsage=false
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from armature.parallel import process_group

# this rank's part of a tensor, and the number of different parts of that tensor
Part = tuple[Tensor, int]
_PIECE_ELEMENTS = 1 << 15


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; it shares memory with the tensor.

    Sums, and products with a number, need only the parts, even if the parts are sums that are not
    reduced yet.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Iterable[Tensor]) -> list[Part]:
    """Return this rank's part of each tensor; of a sparse one its values, which share memory if it
    is coalesced.
    """
    parts = [(local_part(tensor).detach(), _part_count(tensor)) for tensor in tensors]
    return [(part.coalesce().values() if part.is_sparse else part, count) for part, count in parts]


def local_gradients(parameters: Iterable[Tensor]) -> list[Part]:
    """Return `local_parts` of the gradients of the parameters that have one.

    Sparse ones are coalesced for it.
    """
    graded = [param for param in parameters if param.grad is not None]
    for param in graded:
        if param.grad.is_sparse:  # pyright: ignore[reportOptionalMemberAccess]
            param.grad = param.grad.coalesce()  # pyright: ignore[reportOptionalMemberAccess]
    return local_parts(param.grad for param in graded)  # pyright: ignore[reportArgumentType]


def _part_count(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    return math.prod(
        tensor.device_mesh.size(i) for i, p in enumerate(tensor.placements) if not p.is_replicate()
    )


def total_norm(parts: Sequence[Part], *, ranks: int, sharded: bool, device: torch.device) -> Tensor:
    """Return the 2-norm of the unsharded model's gradient, a 0-dim fp32 tensor, the same on every
    rank. Called by all ranks.

    Args:
        ranks: the number of ranks that together hold this rank's pipeline stage.
        sharded: whether ranks hold different parts, whose squares must be added up. The same on
            every rank.
    """
    alike: dict[int, list[Tensor]] = {}
    for part, count in parts:
        alike.setdefault(count, []).extend(_pieces(part))
    norms = {count: _norms(pieces, device=device) for count, pieces in alike.items()}
    total = torch.zeros((), dtype=torch.float32, device=device)  # the default type may be bf16
    if not sharded:  # as torch's clip_grad_norm_, to the last bit
        return torch.linalg.vector_norm(norms[1]) if norms else total
    for count, each in norms.items():  # a sum over all ranks counts each part once
        total += each.square().sum() * (count / ranks)
    return process_group.all_sum(total).sqrt()


def overflow(parts: Sequence[Part], *, device: torch.device) -> Tensor:
    """Return 1.0 if this rank's parts have an infinity or NaN, else 0.0, as a 0-dim tensor."""
    norms = _norms([part for part, _ in parts], device=device) if parts else torch.zeros(1)
    return (~norms.isfinite()).any().to(device, torch.float32)


def _norms(pieces: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Return the 2-norm of each piece, (len(pieces),) in fp32."""
    own = [torch.view_as_real(piece) if piece.is_complex() else piece for piece in pieces]
    # some parts may be float64
    dtype = reduce(torch.promote_types, {piece.dtype for piece in own}, torch.float32)
    each = torch._foreach_norm(own, 2, dtype=dtype)
    # one copy for all norms of offloaded gradients
    alike = [torch.stack([*norms]) for _, norms in groupby(each, key=lambda norm: norm.device)]
    alike = [norms.to(device, torch.float32) for norms in alike]
    return alike[0] if len(alike) == 1 else torch.cat(alike)


def _pieces(part: Tensor) -> Sequence[Tensor]:
    """Cut a large part on a CPU, which adds squares up one by one in fp32: over millions, the fifth
    digit is wrong.
    """
    if part.device.type != "cpu" or part.numel() <= _PIECE_ELEMENTS or not part.is_contiguous():
        return [part]
    return part.view(-1).split(_PIECE_ELEMENTS)


@contextmanager
def split_groups(optimizer: Optimizer) -> Iterator[None]:
    """Within this context no parameter group has both sharded and whole weights, which `foreach`
    and `fused` refuse. What a step puts into a group is kept.
    """
    groups, parts = optimizer.param_groups, []
    for group in groups:
        kinds = [
            [param for param in group["params"] if isinstance(param, DTensor) == kind]
            for kind in (True, False)
        ]
        parts.append([{**group, "params": kind} for kind in kinds] if all(kinds) else [group])
    optimizer.param_groups = [part for of_group in parts for part in of_group]
    try:
        yield
    finally:
        for group, (first, *_) in zip(groups, parts, strict=True):
            group.update({key: value for key, value in first.items() if key != "params"})
        optimizer.param_groups = groups


class AveragedGradients:
    """Averages the gradients of weights that every rank of a group has the whole of, at the end of
    each backward, as ddp does.

    Every backward must reach the same ones on all ranks. What earlier ones have added is equal on
    all ranks, so averaging it again does not change it.

    Attributes:
        enabled: False: the next backward that is enabled averages also what this one adds.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.enabled = group, True
        self._known: dict[Tensor, int] = {}
        self._waiting: set[Tensor] = set()

    def add(self, params: Iterable[Tensor]) -> None:
        """Average the gradients of those that are trained."""
        for param in params:
            if param.requires_grad and param not in self._known:
                self._known[param] = len(self._known)
                param.register_post_accumulate_grad_hook(self._note)

    def _note(self, param: Tensor) -> None:
        self._waiting.add(param)
        if self.enabled:
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        waiting = sorted(self._waiting, key=self._known.__getitem__)
        self._waiting.clear()
        alike: dict[Any, list[Tensor]] = {}
        for grad in (local_part(param.grad) for param in waiting if param.grad is not None):
            if grad.is_sparse:
                dist.all_reduce(grad.div_(self.group.size()), group=self.group)
            else:
                alike.setdefault((grad.dtype, grad.device), []).append(grad)
        for grads in alike.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(self.group.size())
            dist.all_reduce(flat, group=self.group)
            means = flat.split([grad.numel() for grad in grads])
            for grad, mean in zip(grads, means, strict=True):
                grad.copy_(mean.view(grad.shape))


def multiply(parts: Sequence[Part], *, by: Tensor) -> None:
    """Multiply all gradients by a 0-dim tensor, in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for part, _ in parts:
        by_device.setdefault(part.device, []).append(part)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, by.to(device))


@torch.no_grad()
def clip_by_value(parts: Sequence[Part], *, value: float) -> None:
    """Clamp each element of each gradient to [-value, value], in place."""
    for part, _ in parts:
        part.clamp_(-value, value)
