"""FLOPs of a training step and of the hardware: the two numbers behind MFU.

The count depends on the model only, by PaLM's convention (arXiv:2204.02311, appendix B): per token,
6 for each weight of a matrix, and 12 L H K T for attention, with the masked half of causal
attention counted as if it were computed. A multiplication and an addition are two FLOPs.
Recomputation (activation checkpointing) does not count, and neither do norms, activations, look-ups
and the optimizer. So MFU compares across layouts and with published values.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from armature.parallel import randomness

log = logging.getLogger(__name__)
CPU = torch.device("cpu")


def flops_per_sample(
    make_model: Callable[[], nn.Module], inputs: Tensor, targets: Tensor | None
) -> float | None:
    """Return the FLOPs of forward and backward of one sample through the unsharded model; None if
    that fails.

    The model is built once more, without memory. A model with a method `flops_per_sample(inputs)`
    is asked. For others, each operator is counted while one sample without values passes through.

    Args:
        inputs, targets: one micro-batch; only shapes and types matter.
    """
    kept = randomness.capture()  # building draws initial weights
    try:
        with torch.device("meta"):
            model = make_model()
        if hasattr(model, "flops_per_sample"):
            return float(model.flops_per_sample(inputs))  # pyright: ignore[reportCallIssue]
        return counted(model, inputs, targets)
    except Exception as error:
        log.info("The FLOPs per step are unknown: %s could not be counted (%s).", make_model, error)
        return None
    finally:
        randomness.restore(kept)


def counted(model: nn.Module, inputs: Tensor, targets: Tensor | None) -> float:
    """Return the matrix product and convolution FLOPs of forward and backward of one sample, on the
    meta device.
    """
    model.train()
    one = [tensor[:1].to("meta") for tensor in (inputs, targets) if tensor is not None]
    with FlopCounterMode(display=False) as counter:
        output: Any = model(*one)
        output.float().sum().backward()
    return float(counter.get_total_flops())


def measured_peak(
    dtype: torch.dtype, *, device: torch.device = CPU, seconds: float = 0.3, size: int = 1024
) -> float:
    """Return the best rate of square matrix products on one device, in FLOP/s; on a CPU, with this
    process's threads.

    All ranks of a machine measure at the same time, so that each measures its share.
    """
    # random numbers: a power-limited GPU is faster on equal ones
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=draw).to(device, dtype) for _ in range(2))
    out = a @ b
    repeats = 1 if device.type == "cpu" else 10
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return 2 * size**3 / best
