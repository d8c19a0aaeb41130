"""Which parameters are decayed, and which are the hidden matrices that Muon orthogonalizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Up to three groups: hidden matrices, other matrices, and the rest, which has no weight decay.

    Hidden matrices are the two-dimensional parameters inside `model.blocks`; they carry `hidden=True`, and the model's
    `width` where it has one. The rest are
    norms, biases and positions: whatever has one dimension or is called so. A name decides, never a rank's own share
    of a shape, so every layout makes the same groups.
    """
    hidden, matrices, vectors = [], [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if param.ndim < 2 or name.rsplit(".", 1)[-1] in ("bias", "position"):
            vectors.append(param)
        elif param.ndim == 2 and name.startswith("blocks."):
            hidden.append(param)
        else:
            matrices.append(param)
    groups: list[dict[str, Any]] = [
        {"params": hidden, "hidden": True, "width": getattr(model, "width", None)},
        {"params": matrices, "hidden": False},
        {"params": vectors, "hidden": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def carried_over(
    groups: Iterable[dict[str, Any]], *, lr: float, weight_decay: float, base_width: int | None, power: float
) -> list[dict[str, Any]]:
    """The groups, with the rate of hidden matrices times (base_width / width) ** power; None: as they are.

    What decay takes from a weight in a step, rate × decay, stays. Embedding, head and vectors keep the rate.

    Raises:
        ValueError: for a model that has no attribute `width`.
    """
    groups = list(groups)
    if base_width is None:
        return groups
    if any(group["hidden"] and not group["width"] for group in groups):
        raise ValueError(
            f"optimizer.base_width={base_width} needs to know how wide the model is: give it an attribute `width`, "
            "or type optimizer.base_width=null."
        )
    factors = [(base_width / group["width"]) ** power if group["hidden"] else 1.0 for group in groups]
    return [
        group | {"lr": lr * factor, "weight_decay": group.get("weight_decay", weight_decay) / factor}
        for group, factor in zip(groups, factors, strict=True)
    ]
