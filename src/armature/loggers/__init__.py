"""Loggers that a config may name."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class RowWriter(Protocol):
    """A logger that takes several optimizer steps in one call."""

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows of numbers by name; each has the `step` that it belongs to."""
