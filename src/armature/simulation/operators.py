"""Operators that need values, or a build of torch with CUDA: what they return on fake tensors instead.

Where the size of a result depends on values (boolean masks, `nonzero`, `unique`, packed sequences), it is the largest
that it can be, so that the peak is at most what is printed.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import _VF, Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from armature.simulation.meter import Meter

aten = torch.ops.aten
NEEDS_VALUES = ("Cannot access data pointer", "with arguments from the 'CUDA' backend")  # in messages of torch


def install(meter: Meter) -> None:
    """Replace operators, for the rest of this process. `meter` notes each wait of the host for the device."""

    def largest(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(mode: FakeTensorMode, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.is_cuda:
                meter.wait(func.__name__.partition(".")[0].lstrip("_"), assumed=True)
            with mode:
                return answer(x, *args, **kwargs)

        return call

    sized = {
        aten.nonzero.default: lambda x: _indices(x, x.numel(), x.dim()),
        aten.masked_select.default: lambda x, mask: x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel()),
        aten._unique2.default: lambda x, *_, **__: _unique(x, None),
        aten.unique_dim.default: lambda x, dim, *_, **__: _unique(x, dim),
        aten.unique_consecutive.default: lambda x, inverse=False, counts=False, dim=None: _unique(x, dim),
        aten.bincount.default: lambda x, weights=None, minlength=0: (
            _indices(x, max(1, minlength)) if weights is None else weights.new_empty(max(1, minlength))
        ),
        aten.repeat_interleave.Tensor: lambda x, *, output_size=None: _indices(
            x, x.numel() if output_size is None else output_size
        ),
        aten.equal.default: lambda x, other: x.shape == other.shape,
    }
    fake_impls.op_implementations_dict |= {operator: largest(answer) for operator, answer in sized.items()}
    fake_impls.op_implementations_dict |= {operator: _within(answer) for operator, answer in BATCH_NORM.items()}
    fake_impls.op_implementations_dict[aten._pack_padded_sequence.default] = _pack
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        setattr(_VF, name, _recurrent(getattr(_VF, name)))
    _VF._pad_packed_sequence = _unpack  # pyright: ignore[reportAttributeAccessIssue]
    to_numpy = Tensor.numpy
    Tensor.numpy = lambda self, **kwargs: _ones(self) if isinstance(self, FakeTensor) else to_numpy(self, **kwargs)  # pyright: ignore


def lacking(error: Exception) -> str | None:
    """Return the operator that failed because tensors have no values, or None if that is not what happened."""
    known = isinstance(error, DataDependentOutputException | DynamicOutputShapeException | UnsupportedOperatorException)
    if not known and not (isinstance(error, RuntimeError) and any(words in str(error) for words in NEEDS_VALUES)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    dispatched = [frame for frame in frames if frame.f_code is Meter.__torch_dispatch__.__code__]
    return dispatched[-1].f_locals["func"].name() if dispatched else "this operator"


def _within(answer: Callable[..., Any]) -> Callable[..., Any]:
    def call(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return answer(*args, **kwargs)

    return call


def _indices(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=x.device)


def _unique(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor, Tensor]:
    if dim is None:
        return x.new_empty(x.numel()), _indices(x, *x.shape), _indices(x, x.numel())
    return torch.empty_like(x), _indices(x, x.shape[dim]), _indices(x, x.shape[dim])


def _ones(x: Tensor) -> np.ndarray[Any, Any]:
    return np.ones(x.shape, dtype=str(x.dtype).removeprefix("torch."))


# ---------------------------------------------------------------- BatchNorm over several ranks
def _statistics(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape, dtype = x.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
    return tuple(torch.empty(shape, dtype=dtype, device=x.device) for _ in range(2))  # pyright: ignore[reportReturnType]


BATCH_NORM = {  # torch has them for CUDA only
    aten.batch_norm_stats.default: _statistics,
    aten.batch_norm_gather_stats_with_counts.default: _statistics,
    aten.batch_norm_elemt.default: lambda x, *_: torch.empty_like(x),
    aten.batch_norm_backward_reduce.default: lambda dy, x, *_: (*_statistics(x), *_statistics(x)),
    aten.batch_norm_backward_elemt.default: lambda dy, x, *_: torch.empty_like(x),
}


# ---------------------------------------------------------------- packed sequences, of equal lengths
def _pack(mode: FakeTensorMode, func: Any, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    with mode:
        steps = x.transpose(0, 1) if batch_first else x
        data = steps.reshape(-1, *steps.shape[2:])
    sizes = torch.full(steps.shape[:1], steps.shape[1], dtype=torch.int64)
    return data, mode.fake_tensor_converter.from_real_tensor(mode, sizes, make_constant=True)


def _unpack(data: Tensor, sizes: Tensor, batch_first: bool, *_: Any) -> tuple[Tensor, Tensor]:
    steps = data.reshape(len(sizes), -1, *data.shape[1:])
    lengths = torch.full((steps.shape[1],), steps.shape[0], dtype=torch.int64)
    return steps.transpose(0, 1) if batch_first else steps, lengths


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent layer that takes a packed sequence as one of equal lengths."""

    def call(x: Tensor, *args: Any) -> Any:
        if not isinstance(args[2], list | tuple):  # the weights, which come after lengths and state
            return function(x, *args)
        sizes, *others = args
        out, *last = function(x.view(len(sizes), -1, *x.shape[1:]), *others, False)
        return (out.flatten(0, 1), *last)

    return call
