"""A signal that ends a run reaches its data workers, which go on until the rank ends them."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader

from armature.data.samples import BeginWorker


class Pids(torch.utils.data.Dataset):
    of_user = None  # the user's own dataset, as the feed's know it

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return os.getpid()


def is_running(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells who sent a signal"
)
def test_a_worker_ends_with_its_rank_alone():
    loader = DataLoader(
        Pids(),
        num_workers=1,
        batch_size=1,
        worker_init_fn=BeginWorker(None),
        persistent_workers=True,
    )
    batches = iter(loader)
    pid = int(next(batches))
    for name in ("TERM", "INT", "HUP", "USR1", "QUIT", "TERM"):
        subprocess.run(["kill", f"-{name}", str(pid)], check=True)  # from another process
    time.sleep(0.2)
    assert [int(each) for each in batches] == [pid] * 7
    assert is_running(pid)
    os.kill(pid, signal.SIGTERM)  # as torch ends a worker that does not end by itself
    (worker,) = batches._workers
    worker.join(timeout=20)
    assert not worker.is_alive()
