"""One process per run directory: a second one would mix its rows and checkpoints with the first's.

The process that starts the ranks holds a lease (rank 0, if torchrun, srun or agents of several
machines start them) on the run directory, and on the run's folder under `checkpoint.root` if that
is in a file system. The lease is filelock's: the file `.lock` names its holder, who touches it
every REFRESH_SECONDS. Another process takes it over

at once                 if the holder is a process of this machine that has died
after LEASE_SECONDS     without a touch
"""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from filelock import LeaseCompromise, SoftFileLease, Timeout
from omegaconf import DictConfig, OmegaConf

from armature.checkpoint import directory, resume
from armature.errors import ConfigError

log = logging.getLogger(__name__)

NAME = ".lock"
REFRESH_SECONDS = 5.0
LEASE_SECONDS = 60.0
EXIT_LOST = 1


class Lock:
    """The lease on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lease = self._new()

    def acquire(self) -> None:
        """Take the lease.

        Raises:
            ConfigError: another process holds it.
        """
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            # of several that find a dead holder, the slower ones would take over the first's lease
            with suppress(OSError):  # not on NFS: there it ends at the next touch
                fcntl.flock(folder, fcntl.LOCK_EX)
            self._acquire()
        finally:
            os.close(folder)

    def _acquire(self) -> None:
        while True:  # a process that died and that nobody has waited for keeps its lease a minute
            try:
                self._lease.acquire(timeout=0.5)
            except Timeout:
                wait_for_end(self.folder)
            else:
                return

    def release(self) -> None:
        with suppress(OSError):
            self._lease.release()

    def _new(self) -> SoftFileLease:
        return SoftFileLease(
            self.folder / NAME,
            lease_duration=LEASE_SECONDS,
            heartbeat_interval=REFRESH_SECONDS,
            on_compromise=self._recover,
            thread_local=False,
        )

    def _recover(self, loss: LeaseCompromise) -> None:
        """Take the lease again if nobody else has it; else end this process, and with it its ranks,
        without another write. Called in the lease's thread.
        """
        lease = self._new()
        while loss.reason != "owner-changed":
            try:
                self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
                lease.acquire(timeout=LEASE_SECONDS + REFRESH_SECONDS)
            except Timeout:
                break
            except OSError:  # the file server is away
                time.sleep(REFRESH_SECONDS)
            else:
                self._lease = lease
                return
        message = f"\n{self.folder} was taken over by {holder(self.folder)}: this process ends.\n"
        os.write(2, message.encode())
        os._exit(EXIT_LOST)


def holder(folder: Path) -> str:
    """Return who holds a folder, for messages."""
    owner = SoftFileLease(folder / NAME).owner
    return "another process" if owner is None else f"process {owner.pid} on {owner.hostname}"


def is_held(folder: Path) -> bool:
    """Return whether a process holds a folder; of another machine, whether it did lately."""
    if (touched := _touched(folder)) is None:
        return False
    owner = SoftFileLease(folder / NAME).owner
    dead = owner is not None and owner.hostname == socket.gethostname() and not _lives(owner.pid)
    return time.time() - touched < LEASE_SECONDS and not dead


def _touched(folder: Path) -> float | None:
    """Return when a lease was touched, by the file system's clock; None: there is none."""
    try:
        return (folder / NAME).stat().st_mtime
    except OSError:
        return None


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _in_use(folder: Path) -> str:
    owner = SoftFileLease(folder / NAME).owner
    end = ""
    if owner is not None:
        here = owner.hostname == socket.gethostname()
        command = f"kill {owner.pid}" if here else f"ssh {owner.hostname} kill {owner.pid}"
        end = f", or end that one: {command}"
    return (
        f"{folder} is in use by {holder(folder)}. Two processes in one run directory would mix "
        f"their rows and checkpoints. Type another run.name{end}"
    )


def check(cfg: DictConfig) -> None:
    """Raise ConfigError if another process holds the run directory.

    For agents on several machines, which write to it before the rank that holds the lock has
    started.
    """
    wait_for_end(Path(cfg.run.dir))


def wait_for_end(folder: Path) -> None:
    """Wait until it is known that the last holder of a folder has died.

    Raises:
        ConfigError: it lives: here, or on another machine, where it touches its lease meanwhile.
    """
    if not is_held(folder):
        return
    owner, touched = SoftFileLease(folder / NAME).owner, _touched(folder)
    if owner is not None and owner.hostname == socket.gethostname():
        raise ConfigError(_in_use(folder))
    log.warning("%s: waiting to see whether %s still runs.", folder, holder(folder))
    end = time.monotonic() + LEASE_SECONDS
    while is_held(folder):
        if _touched(folder) not in (touched, None) or time.monotonic() > end:
            raise ConfigError(_in_use(folder))
        time.sleep(1)


@contextmanager
def hold(cfg: DictConfig) -> Iterator[None]:
    """Hold the leases of a run while entered.

    Raises:
        ConfigError: another process holds one, or a folder cannot be written.
    """
    run_dir = Path(cfg.run.dir)
    folders = [run_dir, *([resume.folder(run_dir, cfg)] if cfg.checkpoint.root else [])]
    locks: list[Lock] = []
    try:
        for folder in filter(directory.is_local, folders):
            lock = Lock(folder)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            except OSError as error:
                key = "run.root" if folder == run_dir else "checkpoint.root"
                other = f"{key} or run.name" if folder == run_dir else key
                why = f"{folder} cannot be made ({error.strerror or error})"
                raise ConfigError(
                    f"{key}={OmegaConf.select(cfg, key)}: {why}. Type another {other}."
                ) from error
            locks.append(lock)
        yield
    finally:
        for lock in locks:
            lock.release()
        with suppress(OSError):  # the run was refused before anything was written
            run_dir.rmdir()
