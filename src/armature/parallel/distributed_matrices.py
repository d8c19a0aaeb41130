"""Work on whole matrices, such as Muon's, shared by the ranks that would otherwise all do the same work.

Matrices of one shape are processed in rounds of one matrix per rank, or fewer if they are large. If every rank holds
the whole matrices, each rank works on one of them and sends the result to the others. If the matrices are sharded, one
all-to-all gathers each matrix on one rank, and another one sends the shards of the result back. This communicates as
many elements as the ranks hold; an all-gather of every matrix would send that times the number of ranks.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Function = Callable[[Tensor], Tensor]  # from an unsharded matrix to one of the same shape and dtype
MAX_ROUND_ELEMENTS = 2**28


class DistributedMatrices:
    """Replaces `optim.muon.LocalMatrices`. Every rank must pass the same matrices in the same order.

    The ranks of `group` hold the same unsharded matrices and share the work on them. Without a group every rank works
    on all of them. Sharded matrices bring their own group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def rounds(self, matrices: Sequence[Tensor]) -> list[list[int]]:
        """Return lists of indices of the matrices, each list for one call of `map`."""
        alike: dict[Any, tuple[dist.ProcessGroup | None, int | None, list[int]]] = {}
        for i, matrix in enumerate(matrices):
            group, dim = self._held(matrix)
            key = (i,) if group is None else (group.group_name, dim, *matrix.shape)
            alike.setdefault(key, (group, dim, []))[2].append(i)
        rounds = []
        for group, dim, indices in alike.values():
            size = 1 if group is None else group.size()
            if dim is None:  # all results of a round are in memory at once
                size = max(1, min(size, MAX_ROUND_ELEMENTS // matrices[indices[0]].numel()))
            rounds += [indices[i : i + size] for i in range(0, len(indices), size)]
        return rounds

    def map(self, matrices: list[Tensor], function: Function) -> list[Tensor]:
        """Return `function` of each unsharded matrix of one of the `rounds`, sharded as the matrix is."""
        group, dim = self._held(matrices[0])
        if group is None:
            return [_replicated(matrix, function) for matrix in matrices]
        if dim is None:
            return _broadcast(matrices, function, group=group)
        return _exchanged(matrices, function, dim=dim, group=group)  # pyright: ignore[reportArgumentType]

    def _held(self, matrix: Tensor) -> tuple[dist.ProcessGroup | None, int | None]:
        """Return the ranks that share the work on a matrix (None: all do it), and its sharded dim (None: unsharded)."""
        if not isinstance(matrix, DTensor):
            return self.group, None
        mesh = matrix.device_mesh
        sharded = [(i, p) for i, p in enumerate(matrix.placements) if not p.is_replicate() and mesh.size(i) > 1]
        if len(sharded) != 1:
            return None, None
        axis, placement = sharded[0]
        if type(placement) is not Shard:  # partial sums, or strided shards
            return None, None
        return mesh.get_group(axis), placement.dim


def _replicated(matrix: Tensor, function: Function) -> Tensor:
    if not isinstance(matrix, DTensor):
        return function(matrix)
    result = DTensor.from_local(function(matrix.full_tensor()), matrix.device_mesh, run_check=False)
    return result.redistribute(placements=matrix.placements).to(matrix.device)


def _broadcast(matrices: list[Tensor], function: Function, *, group: dist.ProcessGroup) -> list[Tensor]:
    """Let rank i work on matrix i, which every rank holds, and send the result to all ranks."""
    rank, like = group.rank(), matrices[0]
    results = like.new_empty(len(matrices), *like.shape)
    if rank < len(matrices):
        results[rank] = function(matrices[rank])
    if len(matrices) == group.size():
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(results.view(-1), results[rank].clone().view(-1), group=group)
    else:  # ranks without a matrix send nothing
        for i, result in enumerate(results):
            dist.broadcast(result, group_src=i, group=group)
    return list(results)


def _exchanged(matrices: list[DTensor], function: Function, *, dim: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Gather matrix i on rank i through an all-to-all, let it work there, and send the shards of the result back."""
    rank, ranks = group.rank(), group.size()
    shape, shards = matrices[0].shape, [matrix.to_local() for matrix in matrices]
    chunk = -(-shape[dim] // ranks)  # as Shard splits
    lengths = [min(chunk, max(0, shape[dim] - i * chunk)) for i in range(ranks)]
    has_matrix = rank < len(matrices)
    sent = [shards[0].numel() if i < len(matrices) else 0 for i in range(ranks)]  # elements, to each rank
    received = [length * (shape.numel() // shape[dim]) if has_matrix else 0 for length in lengths]
    outgoing = torch.cat([shard.reshape(-1) for shard in shards])
    own = outgoing.new_empty(sum(received))
    dist.all_to_all_single(own, outgoing, received, sent, group=group)
    if has_matrix:
        pieces = zip(own.split(received), lengths, strict=True)
        shards_of_own = [piece.view(*shape[:dim], length, *shape[dim + 1 :]) for piece, length in pieces]
        result = function(torch.cat(shards_of_own, dim))
        own = torch.cat([shard.reshape(-1) for shard in result.split(lengths, dim)])
    returned = torch.empty_like(outgoing)
    dist.all_to_all_single(returned, own, sent, received, group=group)
    parts = zip(returned.split(sent[: len(matrices)]), shards, matrices, strict=True)
    return [_sharded_like(matrix, part.view_as(shard)) for part, shard, matrix in parts]


def _sharded_like(matrix: DTensor, local: Tensor) -> DTensor:
    if local.device.type != matrix.device_mesh.device_type:  # offloaded: from_local would move it to the mesh's device
        result: Any = torch.empty_like(matrix)
        result.to_local().copy_(local)
        return result
    return DTensor.from_local(
        local, matrix.device_mesh, matrix.placements, run_check=False, shape=matrix.shape, stride=matrix.stride()
    )
