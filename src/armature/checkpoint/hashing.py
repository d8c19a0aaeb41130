"""Compute the checksums of a checkpoint's files while they are written, so that nothing is read
back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from torch.serialization import get_crc32_options, set_crc32_options

from armature.checkpoint.directory import FileEntries


class HashingFileSystem:
    """The file system of torch's checkpoint writer, local or remote, which also describes the files
    written through it.

    Attributes:
        written: size and SHA-256 of the complete files by name, as `directory.describe` returns
            them.
    """

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system
        self.written: FileEntries = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file_system, name)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._file_system.create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream)
            try:
                with _without_crc32():
                    yield hashing
            except RuntimeError as error:  # torch.save's own, for a full disk too
                raise hashing.error or error from None
        self.written[PurePath(path).name] = {
            "bytes": hashing.bytes,
            "sha256": hashing.sha256.hexdigest(),
        }

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._file_system.rename(path, new_path)
        self.written[PurePath(new_path).name] = self.written.pop(PurePath(path).name)


class _HashingStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sha256, self.bytes = hashlib.sha256(), 0
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def fileno(self) -> int:
        """Flush first: torch asks for the number to sync, while the file's end is still in this
        process's buffer.
        """
        number = self._stream.fileno()  # raises for an object store
        self._stream.flush()
        return number

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(view)
        self.bytes += len(view)
        return len(view)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Let this thread's torch.save compute no CRC-32: SHA-256 vouches for the file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
