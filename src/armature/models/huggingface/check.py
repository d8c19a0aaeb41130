"""Rules for a model that transformers builds, for the constructor and, torch-free, for the check
before launch.
"""

from collections.abc import Mapping
from typing import Any

from armature.models.sizes import whole_numbers

KERNELS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")


def problems(args: Mapping[str, Any]) -> list[str]:
    """Return every reason why a model of these arguments cannot be built, each with what to
    type.
    """
    found = whole_numbers(args, ("context", "classes"), optional=("classes",))
    if args.get("attention") not in (None, *KERNELS):
        found.append(
            f"model.attention={args['attention']}: type null, or one of {', '.join(KERNELS)}."
        )
    return found
