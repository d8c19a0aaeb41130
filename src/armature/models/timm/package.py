"""Imports timm, also where torchvision is missing, which it declares and its models do not use."""

import importlib
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn


def load() -> Any:
    """Return timm. Raises ValueError if it is not installed."""
    if (found := find_spec("timm")) is None or found.origin is None:
        raise ValueError("timm is not installed. Type make setup EXTRAS=timm")
    if "timm" in sys.modules or find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    # layers import one class, to ask whether a norm is one
    stand_ins = {name: ModuleType(name) for name in ("torchvision", "torchvision.ops.misc")}
    stand_ins["torchvision.ops"] = misc = stand_ins["torchvision.ops.misc"]
    vars(misc)["FrozenBatchNorm2d"] = type("FrozenBatchNorm2d", (nn.Module,), {})
    # models import constants from timm.data, whose own __init__ imports transforms of images
    constants = Path(found.origin).with_name("data") / "constants.py"
    spec: Any = spec_from_file_location("timm.data", constants)
    stand_ins["timm.data"] = module_from_spec(spec)
    sys.modules |= stand_ins
    try:
        spec.loader.exec_module(stand_ins["timm.data"])
        return importlib.import_module("timm")
    finally:
        for name in stand_ins:
            del sys.modules[name]
