"""FLOPs of a training step, the numerator of MFU.

The count depends on the model only, by PaLM's convention (arXiv:2204.02311, appendix B): per token,
6 for each weight of a matrix, and 12 L H K T for attention, with the masked half of causal
attention counted as if it were computed. A multiplication and an addition are two FLOPs.
Recomputation (activation checkpointing) does not count, and neither do norms, activations, look-ups
and the optimizer. So MFU compares across layouts and with published values.
"""

import logging
from collections.abc import Callable

import torch
from lightning.fabric.utilities.throughput import measure_flops
from torch import Tensor, nn

from armature.parallel import randomness

log = logging.getLogger(__name__)


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
    return float(measure_flops(model, lambda: model(*one), lambda output: output.float().sum()))
