"""Signals that end a run reach its data workers, too.

torch's launcher, Slurm and a terminal send them to all processes at once. If a worker ends, torch
raises an error in its rank, before the step is over and its checkpoint is saved: a worker must go
on until the rank ends it.
"""

import multiprocessing
import os
import signal
import threading
from multiprocessing.util import Finalize

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def heed_the_rank_alone() -> None:
    """Ignore in this worker what asks a run to stop.

    It ends when its loader says so through their queue, or with its rank.
    """
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    multiprocessing.parent_process().join()  # pyright: ignore[reportOptionalMemberAccess]
    os._exit(1)


def end_workers_at_exit() -> None:
    """Let this process end the workers that it leaves: Python would send them SIGTERM and wait."""
    # after a pool of the user's has ended, and before Python sends it
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would say that they failed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
