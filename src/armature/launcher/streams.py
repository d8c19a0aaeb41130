"""Let a run survive the end of the terminal or the pipe that it prints to.

Its logs are in the run directory.
"""

import errno
import os
import sys
from typing import Any


class _Lasting:
    """A stream that prints to nowhere once writing has failed: a closed pipe or terminal, or a full
    disk.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        # unlike a pipe's end, nobody has asked for that
        if error.errno == errno.ENOSPC and self is sys.stdout:
            print(
                f"The output cannot be written ({error.strerror}): it is incomplete.",
                file=sys.stderr,
            )
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what is still in its buffer goes there too
        os.close(nowhere)


def make_lasting() -> None:
    """Make this process's standard streams such that no write to them fails."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Lasting):
            setattr(sys, name, _Lasting(stream))
