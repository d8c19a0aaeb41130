"""Which parameters are decayed, and which are the hidden matrices that Muon orthogonalises."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Up to three groups: hidden matrices, other matrices, and the rest, which has no weight decay.

    Hidden matrices are the two-dimensional parameters inside `model.blocks`; they carry `hidden=True`. The rest are
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
        {"params": hidden, "hidden": True},
        {"params": matrices, "hidden": False},
        {"params": vectors, "hidden": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
