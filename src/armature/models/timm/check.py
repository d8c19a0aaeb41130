"""Rules for a model that timm builds, for the constructor and, torch-free, for the check before
launch.
"""

from collections.abc import Mapping
from typing import Any

from armature.models.sizes import fraction, whole_numbers

SIZES = ("classes", "image_size", "channels")


def problems(args: Mapping[str, Any]) -> list[str]:
    """Return every reason why a model of these arguments cannot be built."""
    return whole_numbers(args, SIZES, optional=SIZES[1:]) + fraction(args, "label_smoothing")
