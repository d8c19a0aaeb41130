"""What the ranks add up in an optimizer step, together in one small all-reduce."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class StepSum:
    """The numbers of targets and the squares of sharded gradients, added up over all ranks.

    Where ranks hold different parts of the gradients, their squares are added up in each step, and
    everything else travels with them (`add_up`). Otherwise it is sent while backward runs
    (`start`), so that nobody waits for it.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._sum: Tensor | None = None  # last: targets, if they were sent
        self._work: dist.Work | None = None
        self._has_targets = False

    def start(self, targets: Tensor) -> None:
        """Begin to add up numbers of targets, 0-dim fp32. All ranks must call it."""
        self._sum = targets.reshape(1).clone()
        self._work = dist.all_reduce(self._sum, async_op=True)
        self._has_targets = True

    def add_up(self, squares: Tensor, targets: Tensor | None) -> Tensor:
        """Return the sum of `squares` over all ranks, 0-dim fp32 like `targets`.

        All ranks must call it.

        The tensor that is sent has one size, whatever it holds: how a collective splits it decides
        in which order numbers are added.
        """
        counted = torch.zeros_like(squares) if targets is None else targets.to(squares.device)
        self._sum, self._work = torch.stack([squares, counted]), None
        dist.all_reduce(self._sum)
        self._has_targets = targets is not None
        return self._sum[0]

    def targets(self) -> Tensor | None:
        """Return the number of targets on all ranks, or None if it was not sent since `forget` was
        called.
        """
        return self._arrived()[-1] if self._has_targets else None

    def _arrived(self) -> Tensor:
        assert self._sum is not None
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._sum
