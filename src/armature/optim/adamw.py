"""torch's AdamW, with a learning rate that can be transferred from a narrower model."""

from collections.abc import Iterable
from typing import Any

import torch

from armature.optim.groups import transferred_rates


def adamw(
    params: Iterable[dict[str, Any]],
    *,
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
    base_width: int | None = None,
) -> torch.optim.AdamW:
    """Return AdamW for the groups of `parameter_groups`.

    With `base_width`, `lr` is the rate of a model of that width, and hidden matrices of this model
    get base_width / width of it (µP, arXiv:2203.03466, table 8).
    """
    groups = transferred_rates(
        params, lr=lr, weight_decay=weight_decay, base_width=base_width, power=1.0
    )
    return torch.optim.AdamW(
        groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused
    )
