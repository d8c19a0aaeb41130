"""Rules for a vision transformer's sizes, for the constructor and, torch-free, for the check before
launch.
"""

from collections.abc import Mapping
from typing import Any

from armature.models.sizes import nearest_divisor, nearest_multiple


def problems(args: Mapping[str, Any]) -> list[str]:
    """Return every reason why `VisionTransformer(**args)` cannot be built, each with both values
    and a remedy.
    """
    found = []
    image, patch = args.get("image_size"), args.get("patch_size")
    if image is not None and patch is not None and image % patch:
        found.append(
            f"model.patch_size={patch} does not divide model.image_size={image}: "
            f"model.patch_size={nearest_divisor(image, patch)} does"
        )
    width, heads = args.get("width"), args.get("heads")
    if width is not None and heads is not None and width % heads:
        found.append(
            f"model.heads={heads} does not divide model.width={width}: "
            f"model.heads={nearest_divisor(width, heads)} does, or "
            f"model.width={nearest_multiple(width, heads)}"
        )
    return found
