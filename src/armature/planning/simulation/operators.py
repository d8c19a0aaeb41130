"""Operators that need values: what they return on fake tensors instead.

Where the size of a result depends on values (boolean masks, `nonzero`), it is the largest that it
can be, so that the peak is at most what is printed. Others end the simulation with their line.
"""

# pyright: reportPrivateImportUsage=false
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from armature.errors import ConfigError
from armature.planning.simulation.meter import Meter, line_of

aten = torch.ops.aten
NEEDS_VALUES = ("Cannot access data pointer", "its data is not allocated yet")  # torch's messages


def install(meter: Meter) -> None:
    """Replace operators, for the rest of this process.

    `meter` notes each wait of the host for the device.
    """

    def sized(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
            meter.wait(func.__name__.partition(".")[0], assumed=True)
            with mode:
                return answer(*args, **kwargs)

        return call

    def equal(mode: FakeTensorMode, func: Any, x: Tensor, other: Tensor) -> bool:
        meter.wait("equal")
        return x.shape == other.shape

    def nonzero(x: Tensor) -> Tensor:
        return torch.empty(x.numel(), x.dim(), dtype=torch.int64, device=x.device)

    def masked_select(x: Tensor, mask: Tensor) -> Tensor:
        return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())

    known = fake_impls.op_implementations_dict
    known[aten.nonzero.default] = sized(nonzero)
    known[aten.masked_select.default] = sized(masked_select)
    known[aten.equal.default] = equal


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
    places = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
    line = line_of(reversed(places))
    return ConfigError(
        f"{line}: {'this operator' if func is None else func.name()} needs the values of a tensor, "
        "and simulated tensors have none. Leave this line out of the simulated run. Training is "
        "not affected."
    )
