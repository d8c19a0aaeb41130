"""The mean loss over the targets that count, shared by models, tasks and data, and how a tensor
axis shards it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

# a target that counts neither in a loss nor in a metric; torch's default `ignore_index`
IGNORED = -100


def mean_cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean over the targets (N,) that are not IGNORED, in nats, for logits (N, classes);
    0 if none count.
    """
    logits = logits.float()  # the sum is in fp32
    total = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    return total / (targets != IGNORED).sum().clamp(min=1)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target (…), in fp32 and nats, for logits (…, classes); 0
    where it is IGNORED.
    """
    logits_NV = logits.float().flatten(0, -2)
    return F.cross_entropy(
        logits_NV, targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The part of the vocabulary that a rank's head holds, if a tensor axis shards it.

    Attributes:
        start: the first word of this rank.
        size: words of all ranks.
        all_max, all_sum: replace a tensor by its maximum or sum over the ranks that hold the other
            parts.
    """

    start: int
    size: int
    all_max: Callable[[Tensor], Any]
    all_sum: Callable[[Tensor], Any]
