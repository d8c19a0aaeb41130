"""Reordering of rows whose backward reorders too, instead of adding rows up in an order that is not
fixed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return x[order_M]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (order_M,) = ctx.saved_tensors
        return grads[0][order_M.argsort()], None


def permute(x: Tensor, order_M: Tensor) -> Tensor:
    """Return `x[order_M]` for a permutation of x's rows (M, ...).

    The same bits in every run, also of the gradient.
    """
    return _Permute.apply(x, order_M)  # pyright: ignore[reportReturnType]
