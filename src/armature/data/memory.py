"""Refuse in one message data that this machine's memory cannot hold, and data whose files are
missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from hydra.errors import InstantiationException

from armature.data.batching import LOADER_KEYS
from armature.errors import ConfigError, error_line, place_of

FILE_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
WORDS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_missing(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in WORDS)


@contextmanager
def reporting(what: str, owner: Any) -> Iterator[None]:
    """Raise ConfigError if memory runs out, or a file cannot be opened, while data are built.

    Args:
        what: the data that are built, for the message.
        owner: their data module, or its settings.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        if cause is None or not (is_missing(cause) or isinstance(cause, FILE_ERRORS)):
            raise
        place = place_of(cause)
        if isinstance(cause, FILE_ERRORS):
            raise ConfigError(
                f"data: {error_line(cause)} ({place}, which builds {what}). Name a file or folder "
                "that exists and that "
                "you may use so."
            ) from error
        typed = ", ".join(f"data.{name}={size}" for name, size in _largest(owner))
        remedy = f"Type a smaller number ({typed})" if typed else "Name less data"
        raise ConfigError(
            f"data: this machine's memory cannot hold {what} ({error_line(cause)}; {place}). "
            f"{remedy}, or make each sample when __getitem__ asks for it."
        ) from error


def _largest(owner: Any, *, count: int = 2, least: int = 1000) -> list[tuple[str, int]]:
    """Return the largest whole numbers among the settings of a data module, as far as it keeps them
    by their names.
    """
    if not isinstance(owner, Mapping):
        kept = {**getattr(owner, "hparams", {}), **vars(owner)}
        owner = {name: kept.get(name) for name in inspect.signature(type(owner)).parameters}
    given = {name: value for name, value in owner.items() if name not in LOADER_KEYS}
    sizes = {name: value for name, value in given.items() if type(value) is int and value >= least}
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]
