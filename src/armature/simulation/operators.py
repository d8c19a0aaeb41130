"""Operators that need values, or a build of torch with CUDA: what they return on fake tensors
instead.

Where the size of a result depends on values (boolean masks, `nonzero`, `unique`, packed sequences),
it is the largest that it can be, so that the peak is at most what is printed. `bincount` and
`repeat_interleave` have no largest result: theirs has `minlength` bins, or one of each, and the
peak may be higher.
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
from torch.nn.utils import rnn
from torch.utils._python_dispatch import _disable_current_modes

from armature.errors import ConfigError
from armature.simulation import fake_cuda, hooks
from armature.simulation.meter import Assumed, Meter, line_of

aten = torch.ops.aten
NEEDS_VALUES = (  # in messages of torch
    "Cannot access data pointer",
    "its data is not allocated yet",
    "with arguments from the 'CUDA' backend",
)


def install(meter: Meter) -> None:
    """Replace operators, for the rest of this process.

    `meter` notes each wait of the host for the device.
    """
    fake_cuda.on_wait = lambda: meter.wait("synchronize")

    def sized(answer: Callable[..., Any], assumed: Assumed) -> Callable[..., Any]:
        def call(mode: FakeTensorMode, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.is_cuda and kwargs.get("output_size") is None:
                meter.wait(func.__name__.partition(".")[0].lstrip("_"), assumed=assumed)
            with mode:
                return answer(x, *args, **kwargs)

        return call

    def equal(mode: FakeTensorMode, func: Any, x: Tensor, other: Tensor) -> bool:
        meter.answer()
        if x.is_cuda:
            meter.wait("equal")
        return x.shape == other.shape

    def numpy(x: Tensor, **kwargs: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return to_numpy(x, **kwargs)
        meter.answer()
        return _ones(x)

    largest = {
        aten.nonzero.default: lambda x: _indices(x, x.numel(), x.dim()),
        aten.masked_select.default: lambda x, mask: x.new_empty(
            torch.broadcast_shapes(x.shape, mask.shape).numel()
        ),
        aten._unique2.default: lambda x, *_, **__: _unique(x, None),
        aten.unique_dim.default: lambda x, dim, *_, **__: _unique(x, dim),
        aten.unique_consecutive.default: lambda x, inverse=False, counts=False, dim=None: _unique(
            x, dim
        ),
    }
    smallest = {
        aten.bincount.default: lambda x, weights=None, minlength=0: (
            _indices(x, max(1, minlength))
            if weights is None
            else weights.new_empty(max(1, minlength))
        ),
        aten.repeat_interleave.Tensor: lambda x, *, output_size=None: _indices(
            x, x.numel() if output_size is None else output_size
        ),
    }
    fake_impls.op_implementations_dict |= {
        operator: sized(answer, "largest") for operator, answer in largest.items()
    }
    fake_impls.op_implementations_dict |= {
        operator: sized(answer, "smallest") for operator, answer in smallest.items()
    }
    fake_impls.op_implementations_dict[aten.equal.default] = equal
    fake_impls.op_implementations_dict |= {
        operator: _within(answer) for operator, answer in (BATCH_NORM | CELLS).items()
    }
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        setattr(_VF, name, _recurrent(getattr(_VF, name)))
    _VF._pack_padded_sequence = _packing(_VF._pack_padded_sequence)  # pyright: ignore[reportAttributeAccessIssue]
    hooks.wrap(rnn, "_packed_sequence_init_args", _keeping_sizes)
    _VF._pad_packed_sequence = _unpack  # pyright: ignore[reportAttributeAccessIssue]
    to_numpy = Tensor.numpy
    Tensor.numpy = numpy  # pyright: ignore[reportAttributeAccessIssue]


def explained(error: BaseException) -> ConfigError | None:
    """Return the line that needs values which tensors do not have, or None if that is not what
    happened.
    """
    if (operator := lacking(error)) is None:
        return None
    line = line_of(traceback.extract_tb(error.__traceback__))
    return ConfigError(
        f"{line}: {operator} needs the values of a tensor, and simulated tensors have none. Leave "
        "this line out of the "
        "simulated run. Training is not affected."
    )


def lacking(error: BaseException) -> str | None:
    """Return the operator that failed because tensors have no values, or None if that is not what
    happened.
    """
    known = isinstance(
        error,
        DataDependentOutputException | DynamicOutputShapeException | UnsupportedOperatorException,
    )
    if not known and not (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NEEDS_VALUES)
    ):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    dispatched = [
        frame.f_locals for frame in frames if frame.f_code is Meter.__torch_dispatch__.__code__
    ]
    func = dispatched[-1].get("func") if dispatched else None  # a frame may have been cleared
    return "this operator" if func is None else func.name()


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


# ---------------------------------------------------------------- cells and packed sequences
def _gru_cell(gates: Tensor, others: Tensor, hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(len(hidden), 5 * hidden.shape[1])


def _gru_cell_backward(
    grad: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    gates = 3 * grad.shape[1]
    biases = [grad.new_empty(gates) if has_bias else None for _ in range(2)]
    return (
        grad.new_empty(len(grad), gates),
        grad.new_empty(len(grad), gates),
        torch.empty_like(grad),
        *biases,
    )


CELLS = {  # torch has no form without values
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}


def _packing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a packing by other operators, since the backward of torch's own reads the sizes of the
    batch.
    """

    def call(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        if not isinstance(x, FakeTensor):
            return function(x, lengths, batch_first)
        mode, steps = x.fake_mode, x.transpose(0, 1) if batch_first else x
        with _disable_current_modes():
            sizes = torch.full(steps.shape[:1], steps.shape[1], dtype=torch.int64)
            sizes = mode.fake_tensor_converter.from_real_tensor(mode, sizes, make_constant=True)
        return steps.flatten(0, 1), sizes

    return call


def _whole(x: Tensor, *, steps: int, batch: int) -> Tensor:
    """Return packed values with those appended that shorter sequences of the data lack."""
    missing = steps * batch - len(x)
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _keeping_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let sizes that the data know keep their values on the way to the device."""

    def call(data: Tensor, sizes: Tensor | None = None, *args: Any) -> Any:
        if isinstance(data, FakeTensor) and sizes is not None and not isinstance(sizes, FakeTensor):
            mode = data.fake_mode
            with _disable_current_modes():
                sizes = mode.fake_tensor_converter.from_real_tensor(mode, sizes, make_constant=True)
        return function(data, sizes, *args)

    return call


def _unpack(data: Tensor, sizes: Tensor, batch_first: bool, *_: Any) -> tuple[Tensor, Tensor]:
    steps = _whole(data, steps=len(sizes), batch=int(sizes[0])).reshape(
        len(sizes), -1, *data.shape[1:]
    )
    lengths = torch.full((steps.shape[1],), steps.shape[0], dtype=torch.int64)
    return steps.transpose(0, 1) if batch_first else steps, lengths


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent layer that takes a packed sequence as one of equal lengths."""

    def call(x: Tensor, *args: Any) -> Any:
        if not isinstance(args[2], list | tuple):  # the weights, which come after lengths and state
            return function(x, *args)
        sizes, hidden, *others = args
        batch = (hidden if isinstance(hidden, Tensor) else hidden[0]).shape[1]
        steps = _whole(x, steps=len(sizes), batch=batch).view(len(sizes), batch, *x.shape[1:])
        out, *last = function(steps, hidden, *others, False)
        return (out.flatten(0, 1)[: len(x)], *last)

    return call
