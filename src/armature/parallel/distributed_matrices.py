"""Work on whole matrices, such as Muon's, divided over the ranks that would otherwise all do the same.

Matrices of one shape go through in rounds of one for each rank, or of fewer where they are large. Where every rank has
the whole matrix, each works on one of them and tells the others the result. Where each has a slice, one all-to-all
brings every matrix together on a rank of its own, and another one takes the slices of the result back: as much is sent
as the ranks hold, where gathering every matrix everywhere would send that times the number of ranks.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

Function = Callable[[Tensor], Tensor]
ROUND = 2**28  # elements


class DistributedMatrices:
    """Stands in for `optim.muon.LocalMatrices`; the same matrices in the same order are needed on every rank.

    Args:
        group: ranks that all have the same undivided matrices; None: such matrices are not shared out.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def rounds(self, matrices: Sequence[Tensor]) -> list[list[int]]:
        """Which matrices go through `map` together."""
        alike: dict[Any, list[int]] = {}
        for i, matrix in enumerate(matrices):
            group, dim = self._held(matrix)
            key = (i,) if group is None else (group.group_name, dim, *matrix.shape)
            alike.setdefault(key, []).append(i)
        rounds = []
        for indices in alike.values():
            first = matrices[indices[0]]
            group, dim = self._held(first)
            size = 1 if group is None else group.size()
            if dim is None:  # all results of a round lie in memory at once
                size = max(1, min(size, ROUND // first.numel()))
            rounds += [indices[i : i + size] for i in range(0, len(indices), size)]
        return rounds

    def map(self, matrices: list[Tensor], function: Function) -> list[Tensor]:
        """`function` of each undivided matrix, laid out as the matrix was; it keeps shape and dtype.

        Args:
            matrices: one of the `rounds`.
        """
        group, dim = self._held(matrices[0])
        if group is None:
            return [on_whole(matrix, function) for matrix in matrices]
        if dim is None:
            return _gathered(matrices, function, group=group)
        return _exchanged(matrices, function, dim=dim, group=group)  # pyright: ignore[reportArgumentType]

    def _held(self, matrix: Tensor) -> tuple[dist.ProcessGroup | None, int | None]:
        """The ranks to share with, and the dimension that is cut over them; None and None where nothing is shared."""
        if not isinstance(matrix, DTensor):
            return self.group, None
        mesh = matrix.device_mesh
        cut = [(i, p) for i, p in enumerate(matrix.placements) if not p.is_replicate() and mesh.size(i) > 1]
        if len(cut) != 1 or type(cut[0][1]) is not Shard:
            return None, None
        return mesh.get_group(cut[0][0]), cut[0][1].dim


def on_whole(matrix: Tensor, function: Function) -> Tensor:
    """On every rank the same."""
    if not isinstance(matrix, DTensor):
        return function(matrix)
    result = DTensor.from_local(function(matrix.full_tensor()), matrix.device_mesh, run_check=False)
    return result.redistribute(placements=matrix.placements)


def _gathered(matrices: list[Tensor], function: Function, *, group: dist.ProcessGroup) -> list[Tensor]:
    rank, like = group.rank(), matrices[0]
    results = like.new_empty(len(matrices), *like.shape)
    if rank < len(matrices):
        results[rank] = function(matrices[rank])
    if len(matrices) == group.size():
        dist.all_gather_into_tensor(results.view(-1), results[rank].clone().view(-1), group=group)
    else:  # so that nothing is sent for ranks that had no matrix
        for i, result in enumerate(results):
            dist.broadcast(result, group_src=i, group=group)
    return list(results)


def _exchanged(matrices: list[DTensor], function: Function, *, dim: int, group: dist.ProcessGroup) -> list[Tensor]:
    rank, ranks = group.rank(), group.size()
    shape, slices = matrices[0].shape, [matrix.to_local() for matrix in matrices]
    chunk = -(-shape[dim] // ranks)  # as Shard cuts
    lengths = [min(chunk, max(0, shape[dim] - i * chunk)) for i in range(ranks)]
    has_one = rank < len(matrices)
    sent = [slices[0].numel() if i < len(matrices) else 0 for i in range(ranks)]
    came = [length * (shape.numel() // shape[dim]) if has_one else 0 for length in lengths]

    pieces = torch.cat([part.reshape(-1) for part in slices])
    own = pieces.new_empty(sum(came))
    dist.all_to_all_single(own, pieces, came, sent, group=group)
    if has_one:
        of_rank = [
            piece.view(*shape[:dim], length, *shape[dim + 1 :])
            for piece, length in zip(own.split(came), lengths, strict=True)
        ]
        result = function(torch.cat(of_rank, dim))
        own = torch.cat([part.reshape(-1) for part in result.split(lengths, dim)])
    back = torch.empty_like(pieces)
    dist.all_to_all_single(back, own, sent, came, group=group)
    return [
        DTensor.from_local(
            part.view_as(like), matrix.device_mesh, matrix.placements, run_check=False, shape=shape,
            stride=matrix.stride(),
        )
        for part, like, matrix in zip(back.split(sent[: len(matrices)]), slices, matrices, strict=True)
    ]  # fmt: skip
