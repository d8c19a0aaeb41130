"""What a vision transformer costs, from its constructor's arguments. Torch-free."""

from collections.abc import Mapping
from typing import Any

from armature.models.cost import Cost


def cost(args: Mapping[str, Any]) -> Cost:
    """Return the cost of `VisionTransformer(**args)`."""
    width, classes, patch = (
        args["width"],
        args["classes"],
        args["patch_size"] ** 2 * args["channels"],
    )
    hidden, patches = (
        args.get("ffn_hidden") or 4 * width,
        (args["image_size"] // args["patch_size"]) ** 2,
    )
    matrices = 4 * width * width + 2 * width * hidden
    return Cost(
        first=(patch + 1 + patches) * width,
        block=matrices + 9 * width + hidden,
        last=2 * width + (width + 1) * classes,
        blocks=args["layers"],
        tied=False,
        positions=patches,
        width=width,
        norms=2,
        norm_bytes=4,
        shared_inputs=2 * width,
        inner=5 * width + 2 * hidden,  # q, k, v, attention twice; up and its gelu
        products=6 * width + hidden,
        outputs=2 * width,
        block_matrices=matrices,
        head_matrices=width * classes,
        attention=width,
        classes=classes,
        losses=1,
        chunked_loss=False,
        unit="samples",
    )
