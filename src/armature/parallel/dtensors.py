"""Two things that user code does with weights and gradients, and that DTensors of torch do wrongly or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def support_user_code() -> None:
    """Let `weight.data = …` change a sharded weight, and let `norm()` of a DTensor return an ordinary number.

    torch's own assignment leaves the shard as it is, without an error: a momentum teacher would never move.
    Lightning's `grad_norm` puts norms into `torch.tensor([…])`, which cannot read DTensors.
    """
    DTensor.data = property(Tensor.data.__get__, _assign)  # pyright: ignore[reportAttributeAccessIssue]
    DTensor.norm = _norm


@torch.no_grad()
def _assign(target: DTensor, value: Tensor) -> None:
    same = isinstance(value, DTensor) and value.shape == target.shape and value.dtype == target.dtype
    if not same:
        raise TypeError(
            f"param.data = …: the weight is sharded over ranks, as a DTensor of shape {tuple(target.shape)} and type "
            f"{target.dtype}, and the value is a {type(value).__name__} of {tuple(value.shape)}, {value.dtype}. "
            "Compute it from weights that are sharded alike, outside of the models' forward; or type strategy=ddp."
        )
    target.copy_(value)  # in place: FSDP's own flat shard shares this memory


def _norm(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
    norm = Tensor.norm(self, *args, **kwargs)
    return norm.full_tensor() if isinstance(norm, DTensor) and norm.ndim == 0 else norm
