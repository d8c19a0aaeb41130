"""Write files atomically and durably. Torch-free."""

import hashlib
import os
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


def _part_of(file: Path) -> Path:
    """Return a path beside a file that no other process has, and that `clear_parts` finds."""
    return file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.part")


def replace(file: Path, text: str) -> None:
    """Write a file next to its target and rename it: no reader sees half of it, nor anybody after a
    loss of power.
    """
    with replacing(file) as part:
        part.write_text(text, encoding="utf-8", newline="")


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path of the same name to write to.

    It is renamed to `file` at the end, and removed after an error.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(file) as folder:
        yield (part := folder / file.name)
        sync(part)
        part.replace(file)
        sync(file.parent)


@contextmanager
def folder_beside(file: Path) -> Iterator[Path]:
    """Yield a new folder in the file system of a file, for its parts. It is removed at the end."""
    folder = _part_of(file)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this id
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def why_not_writable(file: Path) -> str | None:
    """Return why a file cannot be written, or None.

    It is tried: rights alone do not tell (/proc, long names).
    """
    try:
        if os.path.isfile(file):
            file.open("ab").close()
        elif not os.path.lexists(file):
            # not the file itself, which another process may write meanwhile
            with folder_beside(file.absolute()):
                pass
        elif os.path.isdir(file):
            return "it is a folder"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None  # of a pipe, too: opening it might never end


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or the nearest of its parents that exists.

    OSError, ValueError: no path has this name.
    """
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def clear_parts(folder: Path) -> None:
    """Remove the leftovers of this machine's dead processes.

    Others may be writing at this moment: their files stay.
    """
    for part in folder.glob(f".*.{socket.gethostname()}.*.part"):
        pid = part.name.split(".")[-2]
        if not psutil.pid_exists(int(pid)):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(
                missing_ok=True
            )


def look_again(folder: Path) -> None:
    """Let an NFS client ask its server what a folder holds: for a minute it believes that what was
    missing still is.
    """
    with suppress(OSError):
        os.listdir(folder)  # opening a folder checks whether it has changed


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk, so that they survive a loss of
    power.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value
