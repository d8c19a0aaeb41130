"""Starts train.py many times, cheaply: each start is a fork of one process that has everything imported.

It is the whole command with its own process, command line, exit code and signals; what it spares are the imports.
"""

import atexit
import contextlib
import functools
import json
import math
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "lightning.pytorch",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "armature.worker",
    "armature.cli",
    "armature.validation.checks",
    "armature.strategies.single",
    "armature.strategies.ddp",
    "tests.resume_parts",
    "tests.nan_parts",
)


@dataclass(frozen=True)
class Ended:
    """How the ranks of one start ended; a signal's number is negative."""

    codes: list[int]
    output: str


class Forks:
    """A context manager: `forks.train("run.name=a", ranks=2)`."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd

    def __enter__(self) -> "Forks":
        from tests import running

        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked"],
            cwd=self.cwd,
            env=running.environment(PYTHONPATH=path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(timeout=20)

    def train(self, *overrides: str, ranks: int = 1, expect: int | None = 0, seconds: int = 0) -> Ended:
        """Runs train.py to its end, as `ranks` ranks that a launcher has started.

        Args:
            expect: the exit code of rank 0; None: any.
            seconds: after which a rank is ended by SIGALRM; 0: never.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"overrides": overrides, "ranks": ranks, "seconds": seconds}) + "\n")
        self._server.stdin.flush()
        ended = Ended(**json.loads(self._server.stdout.readline()))
        assert expect in (None, ended.codes[0]), f"{ended.codes}\n{ended.output[-5000:]}"
        return ended

    def run(
        self, command: list[str], *, cwd: Path, env: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs a Python script as `subprocess.run` does, where it imports nothing that depends on `env`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        job = {"command": command[1:], "cwd": str(cwd), "env": env, "seconds": math.ceil(timeout)}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        return subprocess.CompletedProcess(command, answer["code"], answer["stdout"], answer["stderr"])


@functools.cache
def shared() -> Forks:
    """The forks of all tests of this process that need no folder of their own."""
    forks = Forks(Path(tempfile.mkdtemp(prefix="armature-forks-"))).__enter__()
    atexit.register(shutil.rmtree, forks.cwd)
    atexit.register(forks.__exit__)
    return forks


def serve() -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTED:
        __import__(name)
    with contextlib.suppress(ModuleNotFoundError):
        __import__("wandb")
    log = Path("output.log")
    for line in requests:
        job = json.loads(line)
        if "command" in job:
            answers.write(json.dumps(_run(job)) + "\n")
            answers.flush()
            continue
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log.write_text("")
        pids = [_fork(job, rank, port, log) for rank in range(job["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answers.write(json.dumps({"codes": codes, "output": log.read_text()}) + "\n")
        answers.flush()


def _run(job: dict[str, Any]) -> dict[str, Any]:
    outputs = [Path("stdout.log"), Path("stderr.log")]
    for path in outputs:
        path.write_text("")
    pid = _start(job["command"], *outputs, env=job["env"], cwd=job["cwd"], seconds=job["seconds"])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": code, "stdout": outputs[0].read_text(), "stderr": outputs[1].read_text()}


def _fork(job: dict[str, Any], rank: int, port: int, log: Path) -> int:
    ranks, env = job["ranks"], dict(os.environ)
    if ranks > 1:
        env.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    return _start([str(ROOT / "train.py"), *job["overrides"]], log, log, env=env, cwd=".", seconds=job["seconds"])


def _start(command: list[str], stdout: Path, stderr: Path, *, env: dict[str, str], cwd: str, seconds: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    signal.alarm(seconds)
    try:
        for path, number in ((stdout, 1), (stderr, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
