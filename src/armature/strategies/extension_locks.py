"""Leftover locks in torch's cache of compiled extensions, on which a DeepSpeed run would wait for
ever, in silence.

The process that compiles an extension creates the file `lock` in its folder, and all others wait
until it is gone.
A process that is killed while it compiles leaves it. The file names nobody, but ninja compiles in
that folder: a lock
is a leftover if no process works there and nothing in the folder has changed for a while.
"""

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0  # writing the build files before ninja starts takes less
# on a file system where another machine may compile, whose processes we do not see
SHARED_QUIET_SECONDS = 300.0
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs")
POLL_SECONDS = 1.0


def clear(root: Path | None = None) -> None:
    """Remove the leftovers, and wait for those who compile."""
    reported = set()
    for lock in sorted((root or _root()).glob("**/lock")):
        while (seconds := seconds_left(lock)) > 0:
            if lock not in reported and seconds > QUIET_SECONDS:
                reported.add(lock)
                log.warning(
                    "Waiting: another process may be compiling (%s). If none is, type rm %s",
                    lock.parent,
                    lock,
                )
            time.sleep(min(seconds, POLL_SECONDS))
        if lock.exists():
            log.warning(
                "%s is removed: a process that was killed while it compiled has left it.", lock
            )
            lock.unlink(missing_ok=True)


def seconds_left(lock: Path) -> float:
    """Return for how many seconds this lock must be respected at least; 0: it is a leftover, or
    gone.
    """
    if not lock.exists():
        return 0.0
    folder = lock.parent
    if _is_used(folder):
        return SHARED_QUIET_SECONDS
    changed = 0.0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            changed = max(changed, path.stat().st_mtime)
    return max(
        0.0, changed + (QUIET_SECONDS if _is_local(folder) else SHARED_QUIET_SECONDS) - time.time()
    )


def _is_used(folder: Path) -> bool:
    return str(folder.resolve()) in {
        process.info["cwd"] for process in psutil.process_iter(["cwd"])
    }


def _is_local(folder: Path) -> bool:
    folder = folder.resolve()
    mounts = [
        part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)
    ]
    return bool(mounts) and max(mounts, key=lambda part: len(part.mountpoint)).fstype in LOCAL


def _root() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
