"""Hold a contender at the end of a step until the benchmark requests its next block.

Imports no torch.
"""

import json
import os
import socket
import sys
import time
from typing import Any

from armature.hardware import page_faults, peak_resident_memory

SOCKET = "BENCHMARK_GATE"  # environment variable: the socket on which the benchmark listens


class Gate:
    """`step` is called after every optimizer step. Between two blocks it waits without using a CPU.

    Every rank has one. The first block is the first step, whose end the benchmark times from the
    command on. A later block is timed from the end of its first step on: a machine that was left
    idle, or to others, takes longer for that one, and no training waits like this. The process ends
    when the benchmark says so, or is gone.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET])
        self._stream = self._socket.makefile("rw")
        self._left = self._timed = 1
        self._begin_block()
        self._send({"rank": int(os.environ.get("RANK", 0))})

    def step(self) -> None:
        self._left -= 1
        if self._left == self._timed:
            synchronize()
            self._begin_block()
        if not self._left:
            self._wait()

    def _wait(self) -> None:
        synchronize()
        seconds, cpu_seconds = (
            time.perf_counter() - self._since,
            time.process_time() - self._cpu_since,
        )
        faults = page_faults() - self._faults_since
        answer = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "peak": peak_memory(),
            "faults": faults,
        }
        self._send(answer | {"at": time.time()})
        line = self._stream.readline()
        if not line:  # the benchmark has ended
            sys.stdout.flush()
            os._exit(0)
        self._timed = json.loads(line)["steps"]
        self._left = self._timed + 1

    def _begin_block(self) -> None:
        self._faults_since = page_faults()
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()
        except OSError:
            os._exit(0)


def synchronize() -> None:
    """Wait for the GPU if the process uses one: a block ends when its work is done, not when it is
    queued.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_memory() -> int:
    """Return the peak bytes of this process: allocated on its GPU, or resident on a CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return peak_resident_memory()
