"""Signals that end a run reach its data workers, too.

torch's launcher, Slurm and a terminal send them to all processes at once. If a worker ends, torch
raises an error in its rank, before the step is over and its checkpoint is saved: a worker must go
on until the rank ends it.
"""

import atexit
import multiprocessing
import signal

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def heed_the_rank_alone() -> None:
    """Ignore in this worker what asks a run to stop.

    It ends when its loader says so through their queue, or with its rank.
    """
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """End the workers that are left: Python would send them SIGTERM and wait."""
    if workers := [child for child in multiprocessing.active_children() if child.daemon]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would say that they failed
    for worker in workers:
        worker.kill()
