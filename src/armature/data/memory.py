"""Memory that runs out, and data whose files are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hydra.errors import InstantiationException

from armature.errors import ConfigError, error_line, place_of

FILE_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
WORDS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_missing(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in WORDS)


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Raise ConfigError if memory runs out, or a file cannot be opened, while data are built.

    Args:
        what: the data that are built, for the message.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        if cause is not None and is_missing(cause):
            raise ConfigError(
                f"data: this machine's memory cannot hold {what} ({error_line(cause)}; "
                f"{place_of(cause)}). Type smaller sizes, or make each sample when __getitem__ "
                "asks for it."
            ) from error
        if not isinstance(cause, FILE_ERRORS):
            raise
        raise ConfigError(
            f"data: {error_line(cause)} ({place_of(cause)}, which builds {what}). Name a file or "
            "folder that exists and that you may use so."
        ) from error
