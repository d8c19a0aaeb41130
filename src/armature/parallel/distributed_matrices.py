"""Work on whole matrices, such as Muon's, shared by the ranks that would otherwise all do the same
work.

Each rank works on some of the matrices. If every rank holds all of them, each sends its results to
the others. If they are sharded, one all-to-all gathers each matrix on one rank, and another one
sends the shards of the results back. This communicates as many elements as the ranks hold; an
all-gather of every matrix would send that times the number of ranks. All matrices of a step travel
together, unless they are large.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from armature.parallel.whole_weights import sharded_like, whole

Function = Callable[[Tensor], Tensor]  # from an unsharded matrix to one of the same shape and dtype
# What a rank holds at once besides its weights: all results, or its shards and its share of the
# work
MAX_ROUND_ELEMENTS, MAX_SHARD_ELEMENTS = 2**28, 2**26


class DistributedMatrices:
    """Replaces `optim.muon.LocalMatrices`.

    Every rank must pass the same matrices in the same order.

    The ranks of `group` hold the same unsharded matrices and share the work on them. Without a
    group every rank works on all of them. Sharded matrices bring their own group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def rounds(self, matrices: Sequence[Tensor]) -> list[list[int]]:
        """Return lists of indices of the matrices, each list for one call of `map`."""
        together: dict[Any, tuple[dist.ProcessGroup, bool, list[int]]] = {}
        rounds: list[list[int]] = []
        for i, matrix in enumerate(matrices):
            group, dim = self._held(matrix)
            if group is None:
                rounds.append([i])
            else:
                key = group.group_name, dim is None, matrix.device
                together.setdefault(key, (group, dim is None, []))[2].append(i)
        for group, unsharded, indices in together.values():
            # of sharded matrices, each rank has work in each round
            room, least = (
                (MAX_ROUND_ELEMENTS, 1)
                if unsharded
                else (MAX_SHARD_ELEMENTS * group.size(), group.size())
            )
            current, used = [], 0
            for i in indices:
                if len(current) >= least and used + matrices[i].numel() > room:
                    rounds.append(current)
                    current, used = [], 0
                current.append(i)
                used += matrices[i].numel()
            rounds.append(current)
        return rounds

    def map(self, matrices: list[Tensor], function: Function) -> list[Tensor]:
        """Return `function` of each unsharded matrix of one of the `rounds`, sharded as the matrix
        is.
        """
        group, dim = self._held(matrices[0])
        if group is None:
            return [_replicated(matrix, function) for matrix in matrices]
        if dim is None:
            return _broadcast(matrices, function, group=group)
        dims: Any = [self._held(matrix)[1] for matrix in matrices]
        return _exchanged(matrices, function, dims=dims, group=group)  # pyright: ignore[reportArgumentType]

    def _held(self, matrix: Tensor) -> tuple[dist.ProcessGroup | None, int | None]:
        """Return the ranks that share the work on a matrix (None: all do it), and its sharded dim
        (None: unsharded).
        """
        if not isinstance(matrix, DTensor):
            return self.group, None
        if matrix.ndim == 3:  # a stack: each rank has matrices of its own
            return None, None
        mesh = matrix.device_mesh
        sharded = [
            (i, p)
            for i, p in enumerate(matrix.placements)
            if not p.is_replicate() and mesh.size(i) > 1
        ]
        if len(sharded) != 1:
            return None, None
        axis, placement = sharded[0]
        if type(placement) is not Shard:  # partial sums, or strided shards
            return None, None
        return mesh.get_group(axis), placement.dim


def _replicated(matrix: Tensor, function: Function) -> Tensor:
    if isinstance(matrix, DTensor) and matrix.ndim == 3:
        return _stacked(matrix, function)
    return sharded_like(matrix, function(whole(matrix))).to(matrix.device)


def _stacked(stack: DTensor, function: Function) -> DTensor:
    """Let each rank work on the matrices that it holds.

    Only axes that cut matrices are gathered.
    """
    placements = [
        Replicate() if isinstance(p, Shard) and p.dim > 0 else p for p in stack.placements
    ]
    uncut = stack.redistribute(placements=placements)
    result = _sharded_like(uncut, function(uncut.to_local()))
    return result.redistribute(placements=stack.placements)


def _shares(matrices: Sequence[Tensor], *, ranks: int) -> list[list[int]]:
    """Return the indices of the matrices that each rank works on.

    The largest come first, to the least loaded rank.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [matrix.numel() * min(matrix.shape[-2:]) for matrix in matrices]
    load = [0] * ranks
    for i in sorted(range(len(matrices)), key=lambda i: -work[i]):
        rank = load.index(min(load))
        shares[rank].append(i)
        load[rank] += work[i]
    return shares


def _broadcast(
    matrices: list[Tensor], function: Function, *, group: dist.ProcessGroup
) -> list[Tensor]:
    """Let each rank work on its share of matrices that every rank holds, and send the results to
    all ranks.
    """
    rank, ranks = group.rank(), group.size()
    shares = _shares(matrices, ranks=ranks)
    sizes = [sum(matrices[i].numel() for i in share) for share in shares]
    everyones = matrices[0].new_empty(sum(sizes)).split(sizes)
    for i, place in zip(shares[rank], _parts(everyones[rank], matrices, shares[rank]), strict=True):
        place.copy_(function(matrices[i]))
    for source, result in enumerate(everyones):  # of unequal sizes, or none
        if sizes[source]:
            dist.broadcast(result, group_src=source, group=group)
    results: dict[int, Tensor] = {}
    for share, result in zip(shares, everyones, strict=True):
        results |= zip(share, _parts(result, matrices, share), strict=True)
    return [results[i] for i in range(len(matrices))]


def _parts(flat: Tensor, matrices: Sequence[Tensor], share: Sequence[int]) -> list[Tensor]:
    """Return views of a flat tensor, one after the other, of the shapes of these matrices."""
    sizes = [matrices[i].numel() for i in share]
    return [
        part.view(matrices[i].shape)
        for i, part in zip(share, flat[: sum(sizes)].split(sizes), strict=True)
    ]


def _exchanged(
    matrices: list[DTensor], function: Function, *, dims: list[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Gather each matrix on the rank that works on it, all by one all-to-all, and send the results'
    shards back.
    """
    rank, ranks = group.rank(), group.size()
    shares = _shares(matrices, ranks=ranks)
    order, own = [i for share in shares for i in share], shares[rank]
    shards = [matrix.to_local() for matrix in matrices]
    shapes = {i: _shard_shapes(matrices[i].shape, dim=dims[i], ranks=ranks) for i in own}
    sent = [sum(shards[i].numel() for i in share) for share in shares]  # elements, to each rank
    arriving = [[shapes[i][source].numel() for i in own] for source in range(ranks)]
    received = [sum(sizes) for sizes in arriving]
    outgoing = torch.cat([shards[i].reshape(-1) for i in order])
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    arrived = [
        part.split(sizes) for part, sizes in zip(incoming.split(received), arriving, strict=True)
    ]
    for k, i in enumerate(own):
        pieces = [parts[k].view(shape) for parts, shape in zip(arrived, shapes[i], strict=True)]
        result = function(torch.cat(pieces, dims[i]))
        for piece, shard in zip(
            pieces, result.split([piece.shape[dims[i]] for piece in pieces], dims[i]), strict=True
        ):
            piece.copy_(shard)
    dist.all_to_all_single(outgoing, incoming, sent, received, group=group)
    parts = dict(zip(order, outgoing.split([shards[i].numel() for i in order]), strict=True))
    return [_sharded_like(m, parts[i].view_as(shards[i])) for i, m in enumerate(matrices)]


def _shard_shapes(shape: torch.Size, *, dim: int, ranks: int) -> list[torch.Size]:
    """Return the shapes of the ranks' shards, as Shard splits."""
    chunk = -(-shape[dim] // ranks)
    lengths = [min(chunk, max(0, shape[dim] - i * chunk)) for i in range(ranks)]
    return [torch.Size((*shape[:dim], length, *shape[dim + 1 :])) for length in lengths]


def _sharded_like(matrix: DTensor, local: Tensor) -> DTensor:
    # offloaded: from_local would move it to the mesh's device
    if local.device.type != matrix.device_mesh.device_type:
        result: Any = torch.empty_like(matrix)
        result.to_local().copy_(local)
        return result
    return DTensor.from_local(
        local,
        matrix.device_mesh,
        matrix.placements,
        run_check=False,
        shape=matrix.shape,
        stride=matrix.stride(),
    )
