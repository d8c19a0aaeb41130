"""The ranks that this process started: which died first and of what, and which of them stand still.

The agent knows only that a rank has failed. A thread beside it keeps the order of deaths, since those that follow the
first have errors of their own, and ends ranks that have stopped making steps, which no process would notice by itself.
"""

import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from armature.launcher import environment

TICK = 0.2  # seconds
SHUTDOWN_SECONDS = (
    5.0  # seconds for the others once a rank has failed: they wait for it in vain, some in calls that never return
)


@dataclass
class Rank:
    """A process of the run on this machine.

    Attributes:
        beat: time of the last one.
        idle: seconds since then; None before the first.
    """

    number: int
    pid: int
    handle: int | None  # of the process, readable once it has died; None where the system has no such thing
    beat: int = 0
    idle: float | None = None


@dataclass(frozen=True)
class Death:
    """When a rank ended, as Unix time, and how: its exit code, negative for a signal; None if unknown."""

    at: float
    code: int | None


@dataclass(frozen=True)
class Hang:
    """How long a rank stood still before it was ended, and whether a signal such as SIGSTOP held it."""

    seconds: float
    stopped: bool


class RankWatcher:
    """Watches the ranks while it is entered, and leaves none of them behind.

    Args:
        folder: where ranks leave their heartbeats (ARMATURE_HEARTBEATS), each in a file named by its process id.
        ranks: how many this process starts.
        hang_timeout: seconds without a beat after which a rank is ended; None: never.

    Attributes:
        deaths: of each rank that has ended, by its number.
        hung: the ranks that were ended because they stood still.
        ended: the ranks that were ended because another had failed, or had stood still.
    """

    def __init__(self, folder: Path, *, ranks: int, hang_timeout: float | None) -> None:
        self.folder, self.count, self.hang_timeout = folder, ranks, hang_timeout
        self.deaths: dict[int, Death] = {}
        self.hung: dict[int, Hang] = {}
        self.ended: set[int] = set()
        self._asked_to_end = False
        self._ranks: dict[int, Rank] = {}  # by process id, of those that live
        self._groups: set[int] = set()
        self._kill_deadline: tuple[float, list[int]] | None = None  # when, and whom
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "RankWatcher":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self.kill()
        for rank in self._ranks.values():
            if rank.handle is not None:
                os.close(rank.handle)

    def kill(self) -> None:
        """Ends every rank with all that it has started, now."""
        for pid in {*self._groups, *_children(self.folder)}:
            _kill_group(pid)

    def expect_end(self, *, within: float) -> None:
        """The ranks have been asked to end and have so many seconds; one that fails no longer hurries the others."""
        self._asked_to_end = True
        self._kill_deadline = (time.monotonic() + within, list(self._groups))

    def _run(self) -> None:
        before = time.monotonic()
        while not self._done.is_set():
            if len(self._ranks) < self.count:
                self._find()
            self._wait_for_deaths()
            now = time.monotonic()
            # at most a second a turn: where the whole machine was suspended, nobody stood still
            self._look_at_beats(min(now - before, 1.0))
            before = now
            self._kill_overdue_ranks()

    def _find(self) -> None:
        for pid, number in _children(self.folder).items():
            if pid not in self._ranks:
                self._groups.add(pid)
                self._ranks[pid] = Rank(number, pid, _handle(pid))

    def _wait_for_deaths(self) -> None:
        handles = {rank.handle: rank for rank in self._ranks.values() if rank.handle is not None}
        if not handles:
            self._done.wait(TICK)
            self._ranks = {pid: rank for pid, rank in self._ranks.items() if psutil.pid_exists(pid)}
            return
        poll = select.poll()
        for handle in handles:
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(TICK * 1000):
            rank = handles[handle]
            death = Death(time.time(), _exit_code(handle))
            os.close(handle)
            del self._ranks[rank.pid]
            self._groups.discard(rank.pid)  # in a long run its number may become another's
            self.deaths[rank.number] = death
            if death.code:
                _kill_group(rank.pid)
            if death.code and self._kill_deadline is None and not self._asked_to_end:
                self._kill_deadline = (time.monotonic() + SHUTDOWN_SECONDS, list(self._ranks))

    def _look_at_beats(self, passed: float) -> None:
        for pid, rank in self._ranks.items():
            try:
                beat = (self.folder / str(pid)).stat().st_mtime_ns
            except FileNotFoundError:
                continue
            # not the file's age: clocks are set
            rank.idle = 0.0 if rank.idle is None or beat != rank.beat else rank.idle + passed
            rank.beat = beat
        idle = [(rank, rank.idle) for rank in self._ranks.values() if rank.idle is not None]
        if self.hang_timeout is None or not any(seconds > self.hang_timeout for _, seconds in idle):
            return
        # ranks wait for each other, so they fall silent within the second that may lie between two beats
        nearly = self.hang_timeout - min(2.0, self.hang_timeout / 2)
        stale = [(rank, seconds) for rank, seconds in idle if seconds > nearly]
        for rank, seconds in stale:
            self.hung[rank.number] = Hang(seconds, stopped=_is_stopped(rank.pid))
        for rank, _ in idle:
            _signal(rank.pid, signal.SIGUSR2)  # armature.worker: writes the stacks of all threads to the rank's log
        self._done.wait(1.0)
        for rank, _ in stale:
            _kill_group(rank.pid)
            rank.idle = None

    def _kill_overdue_ranks(self) -> None:
        if self._kill_deadline is not None and time.monotonic() > self._kill_deadline[0]:
            for pid in self._kill_deadline[1]:
                if pid in self._ranks:
                    self.ended.add(self._ranks[pid].number)
                    _kill_group(pid)
            self._kill_deadline = None


def _children(folder: Path) -> dict[int, int]:
    """The ranks among this process's children: process id to rank."""
    found = {}
    for child in psutil.Process().children():
        try:
            rank = environment.watched_rank(child.environ(), heartbeats=folder)
        except psutil.Error:  # it has ended meanwhile
            continue
        if rank is not None:
            found[child.pid] = rank
    return found


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old one, or the process is gone
        return None


def _exit_code(handle: int) -> int | None:
    """Left for the agent to collect, too."""
    try:
        status = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _kill_group(pid: int) -> None:
    """A rank leads a group of its own, which its data loader workers belong to."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS: a group of zombies
        return
