"""Packages that only some data need. Torch-free."""

import importlib
from typing import Any

from armature.errors import ConfigError


def load(module: str, *, needed_by: str) -> Any:
    """Import an optional package. Raises ConfigError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL": "pillow"}.get(module.partition(".")[0], module.partition(".")[0])
        raise ConfigError(
            f"{needed_by} needs the package {package} ({error}). Type make setup EXTRAS=data, or "
            f"pip install {package}."
        ) from error
