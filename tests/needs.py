"""What a test needs that may be absent: it is then skipped by name, or fails under --all."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import pytest

EXTRAS = Path(sys.prefix) / "extras"  # packages that no start of Lightning should see: Makefile
TORCH = tuple(map(int, version("torch").split(".")[:2]))  # the installed version
everything = False  # whether --all was typed


def absent(reason: str) -> NoReturn:
    if everything:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def extra(package: str) -> None:
    """Require a package of .venv/extras."""
    if not (EXTRAS / package).is_dir():
        absent(f"{package} is not installed: make test installs it")
