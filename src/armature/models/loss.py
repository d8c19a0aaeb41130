"""The mean loss over the targets that count, shared by models, tasks and data."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a target that counts neither in a loss nor in a metric; torch's default `ignore_index`


def mean_cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean over the targets (N,) that are not IGNORED, in nats, summed in fp32; 0 if there are none.

    Shape of `logits`: (N, classes).
    """
    total = F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    return total / (targets != IGNORED).sum().clamp(min=1)
