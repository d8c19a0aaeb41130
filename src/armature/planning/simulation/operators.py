"""Operators that need values: what they return on fake tensors instead.

Where the size of a result depends on values (boolean masks, `nonzero`), it is the largest that it
can be, so that the peak is at most what is printed. Others end the simulation with their line.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from armature.planning.simulation.meter import Meter

aten = torch.ops.aten


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
