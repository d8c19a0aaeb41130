"""Signals that end a run reach its data workers, too.

torch's launcher, Slurm and a terminal send them to all processes at once. If a worker ends, torch
raises an error in
its rank, before the step is over and its checkpoint is saved: a worker must go on until the rank
ends it.
"""

import os
import signal
import threading

_STOPS = ("SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


def heed_the_rank_alone() -> None:
    """Ignore in this worker what asks a run to stop.

    SIGTERM ends it if it comes from the rank, as torch sends it.
    """
    for name in _STOPS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    # macOS has none, and no Slurm: there torch's own handler stays
    if not hasattr(signal, "sigwaitinfo"):
        return
    rank = os.getppid()
    # of the threads, too, that this one starts
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(rank,), daemon=True).start()


def _end_with(rank: int) -> None:
    while True:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == rank:
            os._exit(0)
