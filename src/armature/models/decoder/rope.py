"""Frequencies of rotary positions, and the ways to stretch them to a longer context than a model
was trained on.

Shapes: K head width; frequencies are (K/2,), one for each pair of elements that a position rotates.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def frequencies(
    head_dim: int, *, theta: float, scaling: Mapping[str, Any] | None, device: torch.device | str
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, and the factor of cosines and sines, in fp32.

    `scaling` is the decoder's `rope_scaling`: a `kind` (llama3 if it is left out) and that kind's
    own numbers.
    """
    exponent_K = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    # rounded as where models of Hugging Face were trained: theta**-exponent is 0.008 rad off at
    # position 131,072
    frequency_K = 1.0 / theta**exponent_K
    if scaling is None:
        return frequency_K, 1.0
    numbers = {key: value for key, value in scaling.items() if key != "kind"}
    kind = scaling.get("kind", "llama3")
    if kind == "linear":
        return frequency_K / numbers["factor"], 1.0
    if kind == "yarn":
        return _yarn(frequency_K, theta, **numbers)
    return _llama3(frequency_K, **numbers), 1.0


def _llama3(
    frequency_K: Tensor,
    *,
    factor: float,
    low_frequency: float,
    high_frequency: float,
    original_context: float,
) -> Tensor:
    """Divide slow rotary frequencies by `factor`, keep fast ones, blend between (Llama 3.1,
    arXiv:2407.21783, 3.4).

    `low_frequency` and `high_frequency` count the turns of a pair within `original_context`
    positions.
    """
    turns_K = original_context * frequency_K / (2 * math.pi)
    keep_K = ((turns_K - low_frequency) / (high_frequency - low_frequency)).clamp(0.0, 1.0)
    return frequency_K * (keep_K + (1.0 - keep_K) / factor)


def _yarn(
    frequency_K: Tensor,
    theta: float,
    *,
    factor: float,
    original_context: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
) -> tuple[Tensor, float]:
    """Blend as `_llama3` does, but linearly in the pair's number, and sharpen attention (YaRN,
    arXiv:2309.00071, 3.4).

    `beta_slow` and `beta_fast` count turns within `original_context`, rounded to whole pairs.
    """
    pairs = len(frequency_K)

    def pair_of(turns: float) -> float:
        return pairs * math.log(original_context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = (
        max(math.floor(pair_of(beta_fast)), 0),
        min(math.ceil(pair_of(beta_slow)), 2 * pairs - 1),
    )
    number_K = torch.arange(pairs, device=frequency_K.device, dtype=torch.float32)
    divide_K = ((number_K - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    sharpness = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    scale = sharpness if attention_factor is None else attention_factor
    return frequency_K * (1.0 - divide_K) + frequency_K / factor * divide_K, scale
