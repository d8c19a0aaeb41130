"""Rules for the sizes of the model beside this file, checked before launch.

Optional; imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from armature.models.sizes import whole_numbers


def problems(args: Mapping[str, Any]) -> list[str]:
    """Return every reason why `ResidualMLP(**args)` cannot be built."""
    return whole_numbers(args, ("features", "classes", "width", "layers"))
