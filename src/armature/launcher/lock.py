"""One process per run directory: a second one would mix its rows and checkpoints with the first's.

The process that starts the ranks holds the lock (rank 0, if torchrun, srun or agents of several
machines start them), in the run directory and in the run's folder under `checkpoint.root`. The file
`.lock` says who holds it; its holder touches it every REFRESH_SECONDS. A lock is taken over

at once                  if the holder is a dead process of this machine, or an earlier start of
                         the same job
after SILENCE_SECONDS    without a touch, if the holder is on another machine or in another
                         container

No clock is compared with another machine's: ages are differences of modification times in one file
system, and a process that cannot tell waits to see whether the holder touches its lock.
"""

import errno
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
from omegaconf import DictConfig, OmegaConf

from armature.checkpoint import directory, resume
from armature.errors import ConfigError
from armature.launcher import environment, slurm

log = logging.getLogger(__name__)

NAME = ".lock"
REFRESH_SECONDS = 5.0
SILENCE_SECONDS = 60.0
WAIT_SECONDS = 1.0  # between two looks at another machine's lock
SETTLE_SECONDS = 0.5  # after which the winner of a takeover makes sure that it has won
EXIT_LOST = 1
FILES_TO_RESTORE = {"config.yaml", "overrides.txt", "tokenizer.json", "classes.json"}
# file systems without hard links
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True)
class Holder:
    """A process that holds a lock."""

    host: str
    pid: int
    # differs between machines and containers of the same name, and changes when a machine starts
    # again
    machine: str
    started: str  # start time of the process: a later process may get its id
    job: str  # the Slurm job, or the rendezvous of agents on several machines; empty: neither
    restart: int  # how often Slurm has requeued that job
    since: str = field(default_factory=_now)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def this_process(cls, cfg: DictConfig) -> "Holder":
        pid, (job, restart) = os.getpid(), slurm.job()
        # under our own agents, the rendezvous is named after the run, as that of any other start of
        # it
        job = job or cfg.launch.rdzv_endpoint or environment.rendezvous() or ""
        return cls(socket.gethostname(), pid, machine(), _start_time(pid) or "", job, restart)

    @classmethod
    def parse(cls, text: str) -> "Holder | None":
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None  # half-written, or of another version

    def text(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_here(self) -> bool:
        return self.machine == machine() and self.host == socket.gethostname()

    def has_ended(self) -> bool:
        """Return True if this process of this machine has ended."""
        return self.is_here() and _start_time(self.pid) != self.started

    def precedes(self, other: "Holder") -> bool:
        """Return True if this process belongs to an earlier start of the other one's job, which has
        ended it.
        """
        if not self.job or self.job != other.job:
            return False
        agents = not self.job.startswith(slurm.JOB)  # they may give rank 0 to another machine
        return self.restart < other.restart or (agents and self.host != other.host)

    def how_to_end(self) -> str:
        if self.job.startswith(slurm.JOB):
            return f"scancel {self.job.removeprefix(slurm.JOB)}"
        return f"kill {self.pid}" if self.is_here() else f"ssh {self.host} kill {self.pid}"


def machine() -> str:
    """Return an identity of what process ids count in: this machine since its start, or this
    container.
    """
    parts = (
        [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        if sys.platform == "linux"
        else []
    )
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_time(pid: int) -> str | None:
    """Return when a process was started, or None if it has ended.

    On Linux, changes of the clock do not move it.
    """
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.Error:
        return None


# ---------------------------------------------------------------- where locks are kept
class _InFiles:
    """A lock in a file system: created by a hard link and taken away by a rename, both of which
    only one can do.
    """

    settle, interval = 0.0, REFRESH_SECONDS

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / NAME

    def read(self) -> tuple[str, Any] | None:
        """Return the text, and a version that changes with each touch; None if there is no lock."""
        try:
            # opening asks an NFS server again
            with self.file.open(encoding="utf-8", errors="replace") as stream:
                status = os.fstat(stream.fileno())
                return stream.read(), (status.st_ino, status.st_mtime_ns)
        except FileNotFoundError:
            return None

    def age(self, version: Any) -> float:
        """Return the seconds since the touch of that version, by the file system's own clock."""
        probe = self._own_file()
        try:
            return (probe.stat().st_mtime_ns - version[1]) / 1e9
        finally:
            probe.unlink()

    def create(self, text: str) -> bool:
        """Create the lock with this text. Return False if there is one."""
        claim = self._own_file(text)
        try:
            try:
                os.link(claim, self.file)
            except FileExistsError:
                # an NFS server's reply was lost, and its repetition failed
                return claim.stat().st_nlink == 2
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                with suppress(FileExistsError), self.file.open("x", encoding="utf-8") as stream:
                    stream.write(text)
                    return True
                return False
            return True
        finally:
            claim.unlink()

    def remove(self, text: str) -> None:
        """Remove the lock if it has this text."""
        taken = self.file.with_name(f"{NAME}.{secrets.token_hex(8)}")
        try:
            os.rename(self.file, taken)
        except FileNotFoundError:
            return
        # another process was faster: give it back
        if taken.read_text(encoding="utf-8", errors="replace") != text:
            with suppress(FileExistsError):
                os.link(taken, self.file)
        taken.unlink()

    def touch(self, text: str) -> None:
        os.utime(self.file)  # without times: a file server uses its own clock

    def _own_file(self, text: str = "") -> Path:
        path = self.file.with_name(f"{NAME}.{secrets.token_hex(8)}")
        path.write_text(text, encoding="utf-8")
        return path


class _InObjects:
    """A lock in an object store, which can only replace objects: of several that write it, the last
    one has won.
    """

    settle, interval = 2.0, 3 * REFRESH_SECONDS

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / NAME
        self.touches = 0

    def read(self) -> tuple[str, Any] | None:
        try:
            with directory.errors_of_store(self.folder):
                text, _, touches = self.file.read_text(
                    encoding="utf-8", errors="replace"
                ).partition("\n")
        except FileNotFoundError:
            return None
        return f"{text}\n", (text, touches)

    def age(self, version: Any) -> float:
        return 0.0  # unknown: the newcomer watches it

    def create(self, text: str) -> bool:
        if self.read() is not None:
            return False
        self.touch(text)
        return True

    def remove(self, text: str) -> None:
        if (found := self.read()) is not None and found[0] == text:
            with directory.errors_of_store(self.folder):
                self.file.unlink()

    def touch(self, text: str) -> None:
        self.touches += 1
        with directory.errors_of_store(self.folder):
            self.file.write_text(f"{text}{self.touches}\n", encoding="utf-8")


# ---------------------------------------------------------------- taking, keeping, releasing
class Lock:
    """The lock of one folder."""

    def __init__(self, folder: Path, *, own: Holder) -> None:
        self.folder, self.own, self.text = folder, own, own.text()
        self.store = (_InFiles if directory.is_local(folder) else _InObjects)(folder)
        self.next_touch = 0.0  # monotonic time

    def acquire(self) -> None:
        """Take the lock.

        ConfigError: another process holds it; on one machine that is known at once.
        """
        settle = self.store.settle
        while True:
            if (found := self.store.read()) is None:
                if self.store.create(self.text) and self._is_ours(after=settle):
                    self.next_touch = time.monotonic() + self.store.interval
                    return
                continue
            text, version = found
            holder = Holder.parse(text)
            if (why := self._why_stale(holder, version)) is None:
                self._refuse(holder)
            log.warning(
                "%s is taken over from %s, which %s.", self.folder, holder or "another process", why
            )
            self.store.remove(text)
            settle = max(settle, SETTLE_SECONDS)

    def _is_ours(self, *, after: float = 0.0) -> bool:
        if after:
            time.sleep(after)
        found = self.store.read()
        return found is not None and found[0] == self.text

    def _refuse(self, holder: Holder | None) -> NoReturn:
        who = f"{holder} since {holder.since}" if holder is not None else "another process"
        remedy = f", or end that one: {holder.how_to_end()}" if holder is not None else ""
        raise ConfigError(
            f"{self.folder} is in use by {who}. Two processes in one run directory would mix their "
            "rows and "
            f"checkpoints. Type another run.name{remedy}"
        )

    def _why_stale(self, holder: Holder | None, version: Any) -> str | None:
        """Return why a lock may be taken over, or None if its holder lives."""
        if holder is not None:
            if holder.has_ended():
                return "has ended"
            if holder.precedes(self.own):
                return "is an earlier start of this job"
            if holder.is_here():
                return None
        age = self.store.age(version)
        if age < SILENCE_SECONDS:
            log.warning(
                "%s: waiting to see whether %s still runs.",
                self.folder,
                holder or "its last process",
            )
        end = time.monotonic() + SILENCE_SECONDS - max(age, 0.0)
        while time.monotonic() < end:
            time.sleep(WAIT_SECONDS)
            found = self.store.read()
            if found is None:
                return "has ended"
            if found[1] != version:
                return None
        return f"has been silent for {max(age, SILENCE_SECONDS):.0f} s"

    def keep(self) -> bool:
        """Touch the lock if it is time.

        Return False if it is missing; end this process if another one has taken it.
        """
        if time.monotonic() < self.next_touch:
            return True
        self.next_touch = time.monotonic() + self.store.interval
        if (found := self.store.read()) is None:
            return False
        if found[0] != self.text:
            _end_lost(self.folder, Holder.parse(found[0]))
        self.store.touch(self.text)
        return True

    def renew(self) -> None:
        """Create the lock again after somebody has removed it."""
        if directory.is_local(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.store.create(self.text)  # if another process was faster, the next `keep` finds out

    def release(self) -> None:
        with suppress(OSError):
            self.store.remove(self.text)


def check(cfg: DictConfig) -> None:
    """Raise ConfigError if another job holds the run directory; this one's rank 0 may hold it
    already.

    For agents on several machines, which write to it before the rank that holds the lock has
    started.
    """
    lock = Lock(Path(cfg.run.dir), own=Holder.this_process(cfg))
    if (found := lock.store.read()) is None:
        return
    holder = Holder.parse(found[0])
    same_job = holder is not None and holder.job and holder.job == lock.own.job
    if not same_job and lock._why_stale(holder, found[1]) is None:
        lock._refuse(holder)


@contextmanager
def hold(cfg: DictConfig) -> Iterator[None]:
    """Hold the locks of a run while entered.

    ConfigError: another process holds one, or a folder cannot be written.
    """
    run_dir = Path(cfg.run.dir)
    folders = [run_dir, *([resume.folder(run_dir, cfg)] if cfg.checkpoint.root else [])]
    own = Holder.this_process(cfg)
    locks: list[Lock] = []
    try:
        for folder in folders:
            try:
                if directory.is_local(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                lock = Lock(folder, own=own)
                lock.acquire()
            except OSError as error:
                key = "run.root" if folder == run_dir else "checkpoint.root"
                other = f"{key} or run.name" if folder == run_dir else key
                why = f"{folder} cannot be written ({error.strerror or error})"
                raise ConfigError(
                    f"{key}={OmegaConf.select(cfg, key)}: {why}. Type another {other}."
                ) from error
            locks.append(lock)
        with _Keeper(run_dir, locks):
            yield
    finally:
        for lock in locks:
            lock.release()
        with suppress(OSError):  # the run was refused before anything was written
            run_dir.rmdir()


class _Keeper:
    """A thread that keeps the locks, and restores a run directory that somebody has deleted or
    renamed.
    """

    def __init__(self, run_dir: Path, locks: list[Lock]) -> None:
        self.run_dir, self.locks = run_dir, locks
        self.contents: dict[str, bytes] = {}  # of the files that a resume needs besides checkpoints
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="run directory lock")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(REFRESH_SECONDS):
            for lock in self.locks:
                with suppress(OSError):  # a file server may be away for a while
                    if not lock.keep():
                        if lock.folder == self.run_dir:
                            self._restore()
                        lock.renew()
            with suppress(OSError):
                for name in FILES_TO_RESTORE - self.contents.keys():
                    with suppress(FileNotFoundError):
                        self.contents[name] = (self.run_dir / name).read_bytes()

    def _restore(self) -> None:
        missing = [name for name in self.contents if not (self.run_dir / name).exists()]
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        for name in missing:
            (self.run_dir / name).write_bytes(self.contents[name])
        if missing:
            log.error(
                "%s was deleted or renamed while the run trains. Training continues in a new one; "
                "what was in the old "
                "one, such as checkpoints, is no longer there.", self.run_dir
            )  # fmt: skip


def _end_lost(folder: Path, holder: Holder | None) -> NoReturn:
    """End this process, and with it its ranks, without another write: the run directory belongs to
    another one.
    """
    os.write(
        2, f"\n{folder} was taken over by {holder or 'another process'}: this one ends.\n".encode()
    )
    os._exit(EXIT_LOST)
