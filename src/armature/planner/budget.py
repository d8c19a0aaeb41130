"""Compute-optimal sizes (Hoffmann et al., 2022, arXiv:2203.15556): how large a model, on how many
tokens.

Approach 1 of the paper (section 3.1, tables 2 and 3): parameters and tokens both grow with the
square root of the compute, and 5.76e23 FLOPs are best spent on 67 billion parameters and 1.5
trillion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from armature.errors import ConfigError

EXPONENT = 0.5  # of parameters and tokens in compute: table 2, approach 1
ANCHOR_FLOPS, ANCHOR_PARAMETERS = 5.76e23, 67e9  # table 3
FLOPS_PER_PARAMETER_AND_TOKEN = 6
MOST_FLOPS, MOST_HOURS = 1e32, 1e12  # a thousand times the largest trainings and more


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The model and the tokens on which a number of FLOPs is best spent."""

    flops: float
    parameters: float
    tokens: float


def optimum(flops: float) -> Optimum:
    """Return the compute-optimal sizes for a training of so many FLOPs."""
    parameters = ANCHOR_PARAMETERS * (flops / ANCHOR_FLOPS) ** EXPONENT
    tokens = flops / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters)
    return Optimum(flops=flops, parameters=parameters, tokens=tokens)


def optimal_tokens(parameters: int) -> Optimum:
    """Return the compute and the tokens for which a model of so many parameters is the optimum."""
    return optimum(ANCHOR_FLOPS * (parameters / ANCHOR_PARAMETERS) ** (1 / EXPONENT))


def flops_of(text: str, *, flops_per_device_second: float) -> float:
    """Return the FLOPs of a budget: a number of them, or of device hours as in 5000h at a rate that
    is reached.
    """
    try:
        number = float(text.removesuffix("h"))
    except ValueError:
        number = 0.0
    if not 1 <= number <= (MOST_HOURS if text.endswith("h") else MOST_FLOPS):
        raise ConfigError(
            f"--budget {text}: type a number of FLOPs, such as 1e22, or of device hours, such as "
            "5000h."
        )
    return number * 3600 * flops_per_device_second if text.endswith("h") else number
