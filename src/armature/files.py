"""Write files atomically and durably. Torch-free."""

import hashlib
import os
import socket
from pathlib import Path

import psutil


def replace(file: Path, text: str) -> None:
    """Write a file next to its target and rename it, so that no reader sees half of it."""
    part = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8", newline="")
    os.replace(part, file)


def clear_parts(folder: Path) -> None:
    """Remove the leftovers of this machine's dead processes. Others may be writing at this moment: their files stay."""
    for part in folder.glob(f".*.{socket.gethostname()}.*.part"):
        pid = part.name.split(".")[-2]
        if pid.isascii() and pid.isdigit() and not psutil.pid_exists(int(pid)):
            part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
