"""What autocast does to activations, on every device alike."""

import torch
from torch import Tensor


def to_compute_dtype(x: Tensor) -> Tensor:
    """Return x, an activation or a weight, as autocast's matrix products take it; x itself without
    autocast.

    A norm returns fp32 under CUDA's autocast, and each matrix product after it would make and keep
    its own copy in 16 bits. Cast once, they share one copy, and a tensor axis sends half the bytes.
    The products stay the same.
    """
    device = x.device.type
    # which autocast leaves alone
    if x.is_meta or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() else x
