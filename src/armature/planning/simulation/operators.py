"""Operators that need values: what they return on fake tensors instead.

Where the size of a result depends on values (boolean masks, `nonzero`, `unique`), it is the largest
that it can be, so that the peak is at most what is printed. `bincount` and `repeat_interleave` have
no largest result: theirs has `minlength` bins, or one of each, and the peak may be higher.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from armature.errors import ConfigError
from armature.planning.simulation.meter import Assumed, Meter, line_of

aten = torch.ops.aten
NEEDS_VALUES = ("Cannot access data pointer", "its data is not allocated yet")  # torch's messages


def install(meter: Meter) -> None:
    """Replace operators, for the rest of this process.

    `meter` notes each wait of the host for the device.
    """

    def sized(answer: Callable[..., Any], assumed: Assumed) -> Callable[..., Any]:
        def call(mode: FakeTensorMode, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("output_size") is None:
                meter.wait(func.__name__.partition(".")[0].lstrip("_"), assumed=assumed)
            with mode:
                return answer(x, *args, **kwargs)

        return call

    def equal(mode: FakeTensorMode, func: Any, x: Tensor, other: Tensor) -> bool:
        meter.answer()
        meter.wait("equal")
        return x.shape == other.shape

    def numpy(x: Tensor, **kwargs: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return to_numpy(x, **kwargs)
        meter.answer()
        meter.wait("numpy")
        return np.ones(x.shape, dtype=str(x.dtype).removeprefix("torch."))

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
    known = fake_impls.op_implementations_dict
    known |= {operator: sized(answer, "largest") for operator, answer in largest.items()}
    known |= {operator: sized(answer, "smallest") for operator, answer in smallest.items()}
    known[aten.equal.default] = equal
    to_numpy = Tensor.numpy
    Tensor.numpy = numpy  # pyright: ignore[reportAttributeAccessIssue]


def explained(error: BaseException) -> ConfigError | None:
    """Return the line that needs values which tensors do not have, or None if that is not what
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
    line = line_of(traceback.extract_tb(error.__traceback__))
    return ConfigError(
        f"{line}: {'this operator' if func is None else func.name()} needs the values of a tensor, "
        "and simulated tensors have none. Leave this line out of the simulated run. Training is "
        "not affected."
    )


def _indices(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=x.device)


def _unique(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor, Tensor]:
    if dim is None:
        return x.new_empty(x.numel()), _indices(x, *x.shape), _indices(x, x.numel())
    return torch.empty_like(x), _indices(x, x.shape[dim]), _indices(x, x.shape[dim])
