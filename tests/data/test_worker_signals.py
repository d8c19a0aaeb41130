"""A signal that ends a run reaches its data workers, which go on until the rank ends them."""

import multiprocessing
import os
import signal
import subprocess

import pytest
import torch
from torch.utils.data import DataLoader

from armature.data import worker_signals
from armature.data.samples import BeginWorker


class Pids(torch.utils.data.Dataset):
    of_user = None  # the user's own dataset, as the feed's know it

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_worker_ends_with_its_rank_alone(context, monkeypatch):
    loader = DataLoader(
        Pids(),
        num_workers=1,
        batch_size=1,
        worker_init_fn=BeginWorker(None),
        persistent_workers=True,
        multiprocessing_context=context,
    )
    batches = iter(loader)
    pid = int(next(batches))
    for name in ("TERM", "INT", "HUP", "USR1", "QUIT", "TERM"):
        subprocess.run(["kill", f"-{name}", str(pid)], check=True)  # from another process
    assert [int(each) for each in batches] == [pid] * 7
    (worker,) = batches._workers
    assert worker.is_alive()
    assert worker in multiprocessing.active_children()
    # this process may have workers of earlier tests, of which torch would say that they failed
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [worker])
    of_torch = signal.getsignal(signal.SIGCHLD)
    worker_signals._end_workers()
    worker.join(timeout=20)
    assert not worker.is_alive()
    batches._shutdown_workers()  # torch forgets its number
    signal.signal(signal.SIGCHLD, of_torch)
