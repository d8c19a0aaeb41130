"""Files that are whole or not there. Torch-free."""

import hashlib
import os
import socket
from pathlib import Path

import psutil


def replace(file: Path, text: str) -> None:
    """Written beside its target and renamed, so that nobody reads half of it."""
    part = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8", newline="")
    os.replace(part, file)


def clear_parts(folder: Path) -> None:
    """Removes what processes of this machine that are gone left in the middle of `replace`.

    Others, here or on another machine, may be writing there at this moment.
    """
    for part in folder.glob(f".*.{socket.gethostname()}.*.part"):
        if not psutil.pid_exists(int(part.name.split(".")[-2])):
            part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Once it returns, a file's bytes, or a folder's names, outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Of a file, here or in an object store."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
