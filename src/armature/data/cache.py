"""Cache folders that are complete or absent: written elsewhere, locked, checked, rebuilt if
damaged. Torch-free.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from typing_extensions import override

from armature import files
from armature.errors import ConfigError

log = logging.getLogger(__name__)

HEADER = "header.json"


class Mapped(np.memmap):
    """Numbers of a file, memory-mapped. Processes that are not forked get the path, not them."""

    @override
    def __reduce__(self) -> Any:
        if self.filename is None or not self.flags.c_contiguous:
            return super().__reduce__()
        whole = self.base if isinstance(self.base, Mapped) else self
        offset = self.offset + self.ctypes.data - whole.ctypes.data
        return Mapped, (self.filename, self.dtype, "r", offset, self.shape)


def root(cache_dir: str | None) -> Path:
    """Return `cache_dir`, else the environment's ARMATURE_CACHE, else ~/.cache/armature."""
    return (
        Path(cache_dir or os.environ.get("ARMATURE_CACHE") or "~/.cache/armature")
        .expanduser()
        .absolute()
    )


def open_or_build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the header of the cache at `folder`.

    If it is absent or damaged, `build` makes it first.

    Any number of processes may call this at once: one builds, the others wait and open the result.
    `build` writes the
    files to the empty folder that it is given, and returns the header's content.
    """
    if (header := _sound(folder)) is not None:
        return header
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        try:
            held = lock.acquire(timeout=1.0)
        except Timeout:
            log.info("Another process prepares %s; waiting for it.", folder)
            held = lock.acquire()
        with held:
            # or another machine would build anew, and remove what others read
            files.look_again(folder.parent)
            return _sound(folder) or _build(folder, build)
    except OSError as error:
        raise ConfigError(
            f"data.source.cache_dir: {folder.parent} cannot be written "
            f"({error.strerror or error}). Set "
            "data.source.cache_dir, or ARMATURE_CACHE in the environment, to a folder that can."
        ) from error


def fingerprint(header: dict[str, Any]) -> str:
    """Return a hash that is the same for the same files, wherever and whenever they were
    prepared.
    """
    return hashlib.sha256(json.dumps(header["files"], sort_keys=True).encode()).hexdigest()[:16]


def _build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    for part in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(part)  # of a killed process: this one has the lock
    try:
        with files.replacing(folder) as part:
            part.mkdir()
            content = build(part)
            sums = {
                p.name: {"bytes": p.stat().st_size, "sha256": files.sha256(p)}
                for p in sorted(part.iterdir())
            }
            header = {**content, "files": sums}
            (part / HEADER).write_text(json.dumps(header, indent=2) + "\n")
            for path in part.iterdir():
                files.sync(path)
            if folder.exists():  # damaged
                shutil.rmtree(folder)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(
            f"data.source.cache_dir: the disk of {folder.parent} is full. Make room, or set "
            "data.source.cache_dir, or "
            "ARMATURE_CACHE in the environment, to a folder on another one."
        ) from error
    return header


def _sound(folder: Path) -> dict[str, Any] | None:
    """Return the header if every file has the size that was written.

    Otherwise return None, and warn if the folder exists.
    """
    if not folder.exists():
        return None
    try:
        header = json.loads((folder / HEADER).read_text())
        for name, file in header["files"].items():
            if (folder / name).stat().st_size != file["bytes"]:
                raise ValueError(f"{name} has another size than was written")
        return header
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("The cache %s is damaged (%s); preparing it again.", folder, error)
        return None
