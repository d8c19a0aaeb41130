"""Compute the checksums of a checkpoint's files while they are written, so that nothing is read
back.

Both take about a core's time: a save in the background of training on a CPU leaves them to threads
that run only where a core would be idle, since each OpenMP region of training waits for the slowest
of its threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import PurePath
from typing import Any

from torch.serialization import get_crc32_options, set_crc32_options

from armature.checkpoint.directory import FileEntries

PIECE = 4 << 20  # bytes that are written and hashed at a time
SMALL = 1 << 16  # bytes below which another thread costs more than it saves
# how long a save waits for idle cores: on a busy machine it would never be complete
IDLE_SECONDS = 60.0


class SaveThreads:
    """The threads of one save.

    Args:
        idle: leave the work to threads that run only on idle cores, until `hurry` is called or
            IDLE_SECONDS are over. The rest is then done by others: raising a thread's priority
            again would take privileges.
    """

    def __init__(self, *, idle: bool = False) -> None:
        self._ordinary = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._idle = ThreadPoolExecutor(
            2, thread_name_prefix="checkpoint-idle", initializer=_run_when_idle
        )
        self._idle_until = time.monotonic() + IDLE_SECONDS if idle else 0.0

    def hurry(self) -> None:
        """Stop waiting for idle cores, since somebody waits for this save."""
        self._idle_until = 0.0

    def both(
        self,
        write: Callable[[memoryview], Any],
        calculate: Callable[[memoryview], Any],
        pieces: Sequence[memoryview],
    ) -> None:
        """Call both with each of the pieces in order, at the same time, and return when both have
        ended.

        Raises the error of either. Neither waits for the other's piece.
        """
        calculated = _submit(self._ordinary, partial(self._each, calculate, pieces))
        try:
            self._each(write, pieces)
        finally:
            wait([calculated])
        calculated.result()

    def _each(self, function: Callable[[memoryview], Any], pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            if time.monotonic() < self._idle_until:
                _submit(self._idle, partial(function, piece)).result()
            else:
                function(piece)

    def end(self) -> None:
        self._ordinary.shutdown(wait=False)
        self._idle.shutdown(wait=False)


def _submit(pool: ThreadPoolExecutor, work: Callable[[], Any]) -> Future[Any]:
    try:
        return pool.submit(work)
    except RuntimeError:  # the interpreter ends, and waits for this save
        done = Future[Any]()
        done.set_result(work())
        return done


def _run_when_idle() -> None:
    if hasattr(os, "SCHED_IDLE"):  # Linux
        with suppress(OSError):  # not allowed in this container
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


class HashingFileSystem:
    """The file system of torch's checkpoint writer, local or remote, which also describes the files
    written through it.

    Attributes:
        written: size and SHA-256 of the complete files by name, as `directory.describe` returns
            them.
    """

    def __init__(self, file_system: Any, threads: SaveThreads) -> None:
        self._file_system, self._threads = file_system, threads
        self.written: FileEntries = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file_system, name)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._file_system.create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream, self._threads)
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
    def __init__(self, stream: Any, threads: SaveThreads) -> None:
        self._stream, self._threads = stream, threads
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
        """Write all of the data. On return nothing refers to it any more."""
        view = memoryview(data).cast("B")
        try:
            if len(view) < SMALL:
                self._stream.write(view)
                self.sha256.update(view)
            else:
                pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)]
                self._threads.both(self._write, self.sha256.update, pieces)
        except OSError as error:
            self.error = error
            raise
        self.bytes += len(view)
        return len(view)

    def _write(self, piece: memoryview) -> None:
        """Write, and let the disk begin at once instead of at the final fsync."""
        start = self._stream.tell()
        self._stream.write(piece)
        # no file of this machine, or no such call on this system
        with suppress(OSError, AttributeError):
            os.posix_fadvise(self._stream.fileno(), start, len(piece), os.POSIX_FADV_DONTNEED)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Let this thread's torch.save compute no CRC-32: SHA-256 vouches for the file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
