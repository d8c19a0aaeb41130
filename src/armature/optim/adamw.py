"""AdamW as torch has it, with a learning rate that can be carried over from a narrower model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from armature.optim.groups import carried_over


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
    """Takes the groups of `parameter_groups`.

    With `base_width`, `lr` is the rate of a model that is so wide, and hidden matrices of this one get
    base_width / width of it (µP, arXiv:2203.03466, table 8).
    """
    groups = carried_over(params, lr=lr, weight_decay=weight_decay, base_width=base_width, power=1.0)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
