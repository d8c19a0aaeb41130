"""Watch the ranks that this process started: which died first and why, and which hang.

The agent knows only that a rank has failed. A thread here records the order of deaths, since the
later ones have errors of their own. A rank that makes no progress ends itself at its deadline
(`training.watchdog`); one that a signal has stopped cannot, and is killed here.
"""

import json
import os
import select
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from armature.launcher import environment, hang

POLL_SECONDS = 0.2
LATE_SECONDS = 3.0  # behind its deadline, after which a rank is unable to end itself
DEADLINE_SLACK_SECONDS = 0.5  # between a rank's note of its deadline and the clock that ends it
# how long the others may take to end once a rank has failed; some wait for it in calls that never
# return
SHUTDOWN_SECONDS = 5.0


@dataclass
class Rank:
    number: int
    pid: int
    # process file descriptor, readable once the process has died; None if the system has none
    handle: int | None
    progress: hang.Progress | None = None  # None before it has noted any

    def is_late(self, seconds: float) -> bool:
        """Return whether its deadline has passed by so many seconds."""
        deadline = self.progress.deadline if self.progress is not None else None
        return deadline is not None and time.monotonic() > deadline + seconds


class RankWatcher:
    """Watch the ranks while entered, and kill all that remain on exit.

    Args:
        folder: where ranks note their progress (ARMATURE_HEARTBEATS), each in a file named after
            its process id.
        ranks: how many this process starts.

    Attributes:
        alive: the last progress of the ranks that were alive when one hung.
    """

    def __init__(self, folder: Path, *, ranks: int) -> None:
        self.folder, self.count = folder, ranks
        self.deaths: dict[int, float] = {}  # Unix time by rank
        # seconds without progress of those that ended because of it
        self.hung: dict[int, float] = {}
        self.alive: dict[int, hang.Progress] = {}
        self.ended: set[int] = set()  # killed because another had failed
        self._asked_to_end = False
        self._ranks: dict[int, Rank] = {}  # the living ones, by process id
        self._groups: set[int] = set()
        self._kill_deadline: tuple[float, list[int]] | None = None  # monotonic time, process ids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "RankWatcher":
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.glob("*"):  # leftovers of ranks of an earlier attempt
            file.unlink(missing_ok=True)
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
        while not self._done.is_set():
            if len(self._ranks) < self.count:
                self._find_ranks()
            self._read_progress()
            self._wait_for_deaths()
            for rank in [rank for rank in self._ranks.values() if rank.is_late(LATE_SECONDS)]:
                self._note_hang(rank)
                _kill_group(rank.pid)
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
            self.deaths[rank.number], code = time.time(), _exit_code(handle)
            if code == 1 and rank.is_late(-DEADLINE_SLACK_SECONDS):
                self._note_hang(rank)
            os.close(handle)
            del self._ranks[rank.pid]
            self._groups.discard(rank.pid)  # another process may get this id in a long run
            if code:
                _kill_group(rank.pid)
            if code and self._kill_deadline is None and not self._asked_to_end:
                self._kill_deadline = (time.monotonic() + SHUTDOWN_SECONDS, list(self._ranks))

    def _read_progress(self) -> None:
        for pid, rank in self._ranks.items():
            with suppress(FileNotFoundError, ValueError):  # ValueError: it is being written
                rank.progress = hang.Progress(*json.loads((self.folder / str(pid)).read_text()))

    def _note_hang(self, late: Rank) -> None:
        """Note that a rank hangs, and let the others write their stacks, since they end with it."""
        if not self.alive:
            ranks = [rank for rank in self._ranks.values() if rank.progress is not None]
            self.alive = {rank.number: rank.progress for rank in ranks if rank.progress}
            for rank in ranks:
                if rank is not late:
                    with suppress(ProcessLookupError):
                        os.kill(rank.pid, signal.SIGUSR2)
        seconds = late.progress.seconds if late.progress is not None else None
        self.hung[late.number] = seconds or 0.0

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
    """Return the exit code of a dead process, negative for a signal, or None if it is unknown.

    Without reaping it: the agent does.
    """
    with suppress(ChildProcessError):
        if (
            status := os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        ) is not None:
            return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    return None


def _kill_group(pid: int) -> None:
    """Kill a rank and its data loader workers: a rank leads its own process group."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
        os.killpg(pid, signal.SIGKILL)
