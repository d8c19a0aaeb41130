"""Watch the ranks that this process started: which died first and why, and which hang.

The agent knows only that a rank has failed. A thread here records the order of deaths, since the
later ones have errors of their own, and kills ranks that make no progress, which no process notices
by itself.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from armature.launcher import environment, hang

POLL_SECONDS = 0.2
# launch.hang_timeout=auto: the larger of these seconds and slowest steps
AUTO_SECONDS, AUTO_STEPS = 300.0, 20
# how long the others may take to end once a rank has failed; some wait for it in calls that never
# return
SHUTDOWN_SECONDS = 5.0


@dataclass
class Rank:
    number: int
    pid: int
    # process file descriptor, readable once the process has died; None if the system has none
    handle: int | None
    beat: int = 0  # modification time of its last heartbeat, in ns
    idle: float | None = None  # seconds since then; None before the first heartbeat
    # seconds of its slowest step; infinite while none is due (validation, a save)
    slowest: float = 0.0


@dataclass(frozen=True)
class Death:
    unix_time: float
    code: int | None  # exit code: negative for a signal, None if unknown


@dataclass(frozen=True)
class Hang:
    seconds: float  # without progress before the rank was killed
    stopped: bool  # by a signal such as SIGSTOP


class RankWatcher:
    """Watch the ranks while entered, and kill all that remain on exit.

    Args:
        folder: the ranks' heartbeats (ARMATURE_HEARTBEATS), each a file named after its process id.
        ranks: how many this process starts.
        hang_timeout: seconds without a heartbeat after which a rank is killed; None: never; auto:
            see AUTO_SECONDS.

    Attributes:
        blocked: what the ranks were doing when they were found to hang (`launcher.hang`).
    """

    def __init__(self, folder: Path, *, ranks: int, hang_timeout: float | str | None) -> None:
        self.folder, self.count, self.hang_timeout = folder, ranks, hang_timeout
        self.deaths: dict[int, Death] = {}
        self.hung: dict[int, Hang] = {}  # killed because they made no progress
        self.asked: list[int] = []  # the ranks that were alive when some hung
        self.blocked: dict[int, Any] = {}
        self.ended: set[int] = set()  # killed because another had failed
        self._asked_to_end = False
        self._ranks: dict[int, Rank] = {}  # the living ones, by process id
        self._groups: set[int] = set()
        self._kill_deadline: tuple[float, list[int]] | None = None  # monotonic time, process ids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "RankWatcher":
        self.folder.mkdir(parents=True, exist_ok=True)
        hang.clear(self.folder)
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
        """Kill every rank with all its child processes, now."""
        for pid in {*self._groups, *_children(self.folder)}:
            _kill_group(pid)

    def set_kill_deadline(self, *, seconds: float) -> None:
        """Kill the ranks after so many seconds.

        They were asked to end, so one that fails shortens no other's time.
        """
        self._asked_to_end = True
        self._kill_deadline = (time.monotonic() + seconds, list(self._groups))

    def _run(self) -> None:
        before = time.monotonic()
        while not self._done.is_set():
            if len(self._ranks) < self.count:
                self._find_ranks()
            self._wait_for_deaths()
            now = time.monotonic()
            # 1.0: if the whole machine was suspended, no rank hangs
            self._check_heartbeats(min(now - before, 1.0))
            before = now
            self._kill_overdue_ranks()

    def _find_ranks(self) -> None:
        for pid, number in _children(self.folder).items():
            if pid not in self._ranks:
                self._groups.add(pid)
                self._ranks[pid] = Rank(number, pid, _handle(pid))

    def _wait_for_deaths(self) -> None:
        handles = {rank.handle: rank for rank in self._ranks.values() if rank.handle is not None}
        if not handles:
            self._done.wait(POLL_SECONDS)
            self._ranks = {pid: rank for pid, rank in self._ranks.items() if psutil.pid_exists(pid)}
            return
        poll = select.poll()
        for handle in handles:
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(POLL_SECONDS * 1000):
            rank = handles[handle]
            self.deaths[rank.number] = death = Death(time.time(), _exit_code(handle))
            os.close(handle)
            del self._ranks[rank.pid]
            self._groups.discard(rank.pid)  # another process may get this id in a long run
            if death.code:
                _kill_group(rank.pid)
            if death.code and self._kill_deadline is None and not self._asked_to_end:
                self._kill_deadline = (time.monotonic() + SHUTDOWN_SECONDS, list(self._ranks))

    def _check_heartbeats(self, passed: float) -> None:
        for pid, rank in self._ranks.items():
            try:
                beat = (self.folder / str(pid)).stat().st_mtime_ns
                if beat != rank.beat:
                    rank.slowest = float((self.folder / str(pid)).read_text())
            except (FileNotFoundError, ValueError):  # ValueError: it is being written
                continue
            # not the file's age, since clocks get set
            rank.idle = 0.0 if rank.idle is None or beat != rank.beat else rank.idle + passed
            rank.beat = beat
        idle = [(rank, rank.idle) for rank in self._ranks.values() if rank.idle is not None]
        timeout = self._timeout()
        if timeout is None or not any(seconds > timeout for _, seconds in idle):
            return
        # ranks wait for each other, so all stop within the second that may lie between two
        # heartbeats
        threshold = timeout - min(2.0, timeout / 2)
        stale = [(rank, seconds) for rank, seconds in idle if seconds > threshold]
        for rank, seconds in stale:
            self.hung[rank.number] = Hang(seconds, stopped=_is_stopped(rank.pid))
        for rank, _ in idle:
            with suppress(ProcessLookupError):
                # the worker writes all threads' stacks to the rank's log
                os.kill(rank.pid, signal.SIGUSR2)
        self.asked = sorted(rank.number for rank in self._ranks.values())
        self.blocked = hang.ask(self.folder, self.asked)
        for rank, _ in stale:
            _kill_group(rank.pid)
            rank.idle = None

    def _timeout(self) -> float | None:
        """Return the seconds after which ranks hang.

        While one validates or saves, the others may wait for it.
        """
        if isinstance(self.hang_timeout, str):  # auto
            return max(
                [AUTO_SECONDS, *(AUTO_STEPS * rank.slowest for rank in self._ranks.values())]
            )
        return self.hang_timeout

    def _kill_overdue_ranks(self) -> None:
        if self._kill_deadline is not None and time.monotonic() > self._kill_deadline[0]:
            for pid in self._kill_deadline[1]:
                if pid in self._ranks:
                    self.ended.add(self._ranks[pid].number)
                    _kill_group(pid)
            self._kill_deadline = None


def _children(folder: Path) -> dict[int, int]:
    """Return the ranks among this process's children: process id → rank."""
    found = {}
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if (rank := environment.watched_rank(child.environ(), heartbeats=folder)) is not None:
                found[child.pid] = rank
    return found


def _handle(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old kernel, or the process has ended
        return None


def _exit_code(handle: int) -> int | None:
    """Return the exit code of a dead process, without reaping it: the agent does."""
    with suppress(ChildProcessError):
        if (
            status := os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        ) is not None:
            return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    return None


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _kill_group(pid: int) -> None:
    """Kill a rank and its data loader workers: a rank leads its own process group."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
        os.killpg(pid, signal.SIGKILL)
