"""Collectives that return new tensors, and their gradients.

torch's functional operators are what torch.compile traces. With chunk and cat beside them they are
what Inductor recognizes and overlaps with the matrix products around them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

_operators = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """The ranks of one axis, and what they make of their tensors together.

    No method has a gradient, except `to_whole` and those after it.
    """

    name: str  # of the process group
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Ranks":
        return cls(group.group_name, group.size(), group.rank())

    def sum(self, x: Tensor) -> Tensor:
        return _operators.wait_tensor(_operators.all_reduce(x.contiguous(), "sum", self.name))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the tensors of all ranks, side by side along `dim`."""
        gathered = _operators.all_gather_into_tensor(x.contiguous(), self.size, self.name)
        parts = _operators.wait_tensor(gathered)
        return torch.cat(parts.chunk(self.size), dim) if dim else parts

    def sum_of_part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim` of the sum over ranks."""
        parts = torch.cat(x.chunk(self.size, dim)) if dim else x.contiguous()
        return _operators.wait_tensor(
            _operators.reduce_scatter_tensor(parts, "sum", self.size, self.name)
        )

    def part(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.size, dim)[self.rank]

    # ------------------------------------------------------------ with gradients
    def to_whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather parts for computations that differ between ranks: their gradients add up."""
        return _Exchange.apply(x, self, Ranks.gather, Ranks.sum_of_part, dim)

    def to_parts(self, x: Tensor, dim: int) -> Tensor:
        """Add up summands, and keep this rank's part of the sum."""
        return _Exchange.apply(x, self, Ranks.sum_of_part, Ranks.gather, dim)

    def to_each(self, x: Tensor) -> Tensor:
        """Return x itself, for computations that differ between ranks: their gradients add up."""
        return _Exchange.apply(x, self, _same, Ranks.sum)

    def to_sum(self, x: Tensor) -> Tensor:
        """Add up summands. All ranks compute alike with the sum."""
        return _Exchange.apply(x, self, Ranks.sum, _same)

    def to_all(self, x: Tensor, dim: int) -> Tensor:
        """Gather parts. All ranks compute alike with the whole."""
        return _Exchange.apply(x, self, Ranks.gather, Ranks.part, dim)

    def to_own(self, x: Tensor, dim: int) -> Tensor:
        """Keep this rank's part of what all ranks have computed alike."""
        return _Exchange.apply(x, self, Ranks.part, Ranks.gather, dim)

    def to_averaged(self, x: Tensor) -> Tensor:
        """Return x itself, with as many times its gradient as there are ranks: sharding averages
        the weights' gradients over them.
        """
        return _Exchange.apply(x, self, _same, lambda ranks, gradient: gradient * ranks.size)


def _same(ranks: Ranks, x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd takes an input that is returned as it is for changed in place


class _Exchange(torch.autograd.Function):
    """A collective whose gradient is another one."""

    @staticmethod
    @override
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, ranks: Ranks, there: Callable[..., Tensor],
        back: Callable[..., Tensor], *dim: int,
    ) -> Tensor:  # fmt: skip
        ctx.back = back, ranks, dim
        return there(ranks, x, *dim)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        back, ranks, dim = ctx.back
        return back(ranks, grads[0], *dim), None, None, None, *(None for _ in dim)
