"""Start contenders, which wait at their gates, and let one at a time run a block of steps."""

import json
import os
import pty
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armature.hardware import WAITING
from benchmarks.gate import SOCKET

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 1800.0  # seconds that a block, or the way to the first step, may take
_OUTSIDE = (
    "SLURM_",
    "TORCHELASTIC",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "PYTHONDONTWRITEBYTECODE",
)


class ContenderFailed(Exception):
    """The contender ended or did not answer. The message ends with its last line of output."""


@dataclass(frozen=True)
class Contender:
    """What is run, and how.

    Attributes:
        command: of one process. `spawn` of them are started, with the variables that torchrun would
            set.
        ranks: processes that train, which all have a gate.
        missing: why it cannot run here; None where it can.
    """

    name: str
    command: Sequence[str]
    ranks: int = 1
    spawn: int = 1
    missing: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Block:
    """Maxima over ranks: seconds, CPU seconds of all threads, peak bytes and page faults."""

    steps: int
    seconds: float
    cpu_seconds: float
    peak: int
    faults: int


def environment() -> dict[str, str]:
    """Return this process's variables without those of launchers and schedulers, and with our
    packages on the path.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OUTSIDE)}
    path = [str(ROOT), str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path)}


def file_name(name: str) -> str:
    """Return a contender's name in letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


class Running:
    """A started contender. It draws its progress bar on its own terminal, as it would for a user.

    Args:
        folder: where its output goes.
    """

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.contender = contender
        self.log = folder / f"{file_name(contender.name)}.log"
        self._socket_folder = tempfile.TemporaryDirectory(
            prefix="gate-"
        )  # short: a socket's path has a limit
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._socket_folder.name}/s")
        self._listener.listen(contender.ranks)
        self._connections: list[socket.socket] = []  # one per rank
        self._streams: list[Any] = []
        self._master, slave = pty.openpty()
        threading.Thread(target=self._copy_output, daemon=True).start()
        self.started = time.time()
        self._processes = [
            subprocess.Popen(
                contender.command,
                cwd=ROOT,
                env=self._environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
            )
            for rank in range(contender.spawn)
        ]
        os.close(slave)
        self.seconds_at_first_step = (
            0.0  # from the creation of the gate to the end of the first step
        )

    def wait_for_first_step(self) -> float:
        """Return the seconds from the command to the end of the slowest rank's first optimizer
        step.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(self._streams) < self.contender.ranks:
                if selector.select(timeout=0.2):
                    connection, _ = self._listener.accept()
                    connection.settimeout(PATIENCE)
                    self._connections.append(connection)
                    self._streams.append(connection.makefile("rw"))
                elif any(process.poll() is not None for process in self._processes):
                    raise self._failure("ended before its first step")
                elif time.time() - self.started > PATIENCE:
                    raise self._failure(f"made no first step within {PATIENCE:.0f} s")
        for stream in self._streams:
            self._read(stream)  # its rank
        answers = [self._read(stream) for stream in self._streams]
        self.seconds_at_first_step = max(answer["seconds"] for answer in answers)
        return max(answer["at"] for answer in answers) - self.started

    def block(self, steps: int) -> Block:
        for stream in self._streams:
            stream.write(json.dumps({"steps": steps}) + "\n")
            stream.flush()
        answers = [self._read(stream) for stream in self._streams]
        measured = ("seconds", "cpu_seconds", "peak", "faults")
        return Block(steps, **{key: max(answer[key] for answer in answers) for key in measured})

    def _read(self, stream: Any) -> dict[str, Any]:
        try:
            line = stream.readline()
        except OSError:
            line = ""
        if not line:
            raise self._failure("ended, or did not answer")
        return json.loads(line)

    def stop(self) -> None:
        """Close the gates, so that the ranks end. Kill what is alive after ten seconds."""
        for stream in self._streams:
            with suppress(OSError):
                stream.close()
        for connection in (*self._connections, self._listener):
            connection.close()
        end = time.monotonic() + (10 if self._streams else 0)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._socket_folder.cleanup()

    def _environment(self, rank: int) -> dict[str, str]:
        kept = environment() | {
            SOCKET: f"{self._socket_folder.name}/s",
            "TERM": "xterm-256color",
            "COLUMNS": "120",
            "HF_HUB_OFFLINE": "1",
        }
        if not {*WAITING} & {*kept}:
            kept |= WAITING  # as ours sets it
        if self.contender.spawn > 1:
            kept |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.contender.spawn),
            }
            kept |= {"LOCAL_WORLD_SIZE": str(self.contender.spawn), "MASTER_ADDR": "127.0.0.1"}
        return kept | dict(self.contender.environment)

    def _copy_output(self) -> None:
        with self.log.open("wb", buffering=0) as file, suppress(OSError):
            while data := os.read(self._master, 65536):
                file.write(data)
        os.close(self._master)

    def _failure(self, what: str) -> ContenderFailed:
        time.sleep(0.3)
        lines = [
            line.strip()
            for line in self.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        return ContenderFailed(f"{what}: {lines[-1][:300] if lines else 'no output'} ({self.log})")
