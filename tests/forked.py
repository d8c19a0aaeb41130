"""Starts train.py many times, cheaply: each start is a fork of one process that has everything
imported.

It is the whole command with its own process, command line, exit code and signals; what it spares
are the imports.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHONPATH = f"{ROOT / 'src'}:{ROOT}"
IMPORTED = (
    "hydra._internal.core_plugins",
    "lightning.pytorch",
    "rich._emoji_codes",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "torch.utils.serialization",
    "armature.launch",
    "armature.launcher.supervise",
    "armature.worker",
    "armature.cli",
    "armature.validation.checks",
    "armature.callbacks.ema",
    "armature.models.decoder.model",
    "armature.optim.adamw",
    "armature.strategies.ddp",
    "armature.strategies.mesh",
    "armature.strategies.single",
    "tests.resume_parts",
    "tests.nan_parts",
    "tests.plain_parts",
)
_held = os.dup(2)  # the descriptor of the last port's socket, once there is one


@dataclass(frozen=True)
class Ended:
    """How the ranks of one start ended; a signal's number is negative."""

    codes: list[int]
    output: str


class Forks:
    """A context manager: `forks.train("run.name=a", ranks=2)`.

    Args:
        cwd: where the commands run.
        imports: further modules that all of them need.
    """

    def __init__(self, cwd: Path, imports: Sequence[str] = ()) -> None:
        self.cwd, self.imports = cwd, imports

    def __enter__(self) -> "Forks":
        from tests import running

        path = os.pathsep.join(filter(None, [PYTHONPATH, os.environ.get("PYTHONPATH")]))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", *self.imports],
            cwd=self.cwd,
            env=running.environment(PYTHONPATH=path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        with self._server:
            # it has nothing to save, and does not see the end of its input while any process that
            # a test has forked still holds the other end
            self._server.kill()

    def train(
        self, *overrides: str, ranks: int = 1, expect: int | None = 0, seconds: int = 0
    ) -> Ended:
        """Runs train.py to its end, as `ranks` ranks that a launcher has started.

        Args:
            expect: the exit code: 0 of all ranks, others of the first one; None: any.
            seconds: after which a rank is ended by SIGALRM; 0: never.
        """
        answer = self._ask(
            command=[str(ROOT / "train.py"), *overrides],
            ranks=ranks,
            seconds=seconds,
            together=True,
        )
        ended = Ended(answer["codes"], answer["stdout"])
        codes = {*ended.codes[: None if expect == 0 else 1]}
        assert expect is None or codes == {expect}, f"{ended.codes}\n{ended.output[-5000:]}"
        return ended

    def run(
        self, command: list[str], *, cwd: Path, env: dict[str, str], timeout: float, ranks: int = 1
    ) -> subprocess.CompletedProcess[str]:
        """Runs a Python script as `subprocess.run` does, where it imports nothing that depends on
        `env`.

        Args:
            ranks: so many processes, which join as torchrun's do. The code is that of the first
                that failed.
        """
        answer = self._ask(
            command=command[1:],
            cwd=str(cwd),
            env=env,
            ranks=ranks,
            seconds=math.ceil(timeout),
            together=False,
        )
        first = next(filter(None, answer["codes"]), 0)
        return subprocess.CompletedProcess(command, first, answer["stdout"], answer["stderr"])

    def _ask(self, **job: Any) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


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
    for name in (*IMPORTED, *sys.argv[1:]):
        __import__(name)
    with _without_cuda():
        _parse_once()
    for name in ("antlr4.LL1Analyzer", "wandb"):  # of Hydra 1.3, and of an extra
        with contextlib.suppress(ModuleNotFoundError):
            __import__(name)
    gc.freeze()  # what is imported is not garbage of any fork
    gc.get_freeze_count = lambda: 1  # counting them takes each fork 0.1 s
    for line in requests:
        answers.write(json.dumps(_run(**json.loads(line))) + "\n")
        answers.flush()


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    """Keep CUDA's driver out of this process: it does not outlive a fork."""
    from armature import hardware

    driver, hardware._cuda_driver = hardware._cuda_driver, lambda: None
    yield
    hardware._cuda_driver = driver
    hardware.gpu_count.cache_clear()


def _parse_once() -> None:
    """Compose and check the default configuration: what its files and the classes' sources say is
    then known.
    """
    from armature import cli
    from armature.validation import checks
    from tests import parsing

    parsing.remember()
    checks.check(
        cli.compose(["trainer.accelerator=cpu", "logger=none"]), prepare=False, open_data=False
    )


def _run(
    *,
    command: list[str],
    cwd: str = ".",
    env: dict[str, str] | None = None,
    ranks: int,
    seconds: int,
    together: bool,
) -> dict[str, Any]:
    """Runs a script to its end. `together`: with one output for both streams."""
    stdout, stderr = Path("stdout.log"), Path("stdout.log" if together else "stderr.log")
    for path in {stdout, stderr}:
        path.write_text("")
    port = free_port()
    pids = [
        _start(
            command,
            stdout,
            stderr,
            env={**(env or os.environ), **(joined(rank, ranks, port) if ranks > 1 else {})},
            cwd=cwd,
            seconds=seconds,
        )
        for rank in range(ranks)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"codes": codes, "stdout": stdout.read_text(), "stderr": stderr.read_text()}


def free_port() -> int:
    """A port that nobody else is given before a rank listens there, which takes it seconds."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        os.dup2(holder.fileno(), _held)
        return holder.getsockname()[1]


def joined(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(
    command: list[str], stdout: Path, stderr: Path, *, env: dict[str, str], cwd: str, seconds: int
) -> int:
    if pid := os.fork():
        return pid
    code = 1
    faulthandler.register(signal.SIGALRM, chain=True)  # the stacks are in the output
    signal.alarm(seconds)
    try:
        for path, number in ((stdout, 1), (stderr, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:0] = [
            path
            for path in env.get("PYTHONPATH", "").split(os.pathsep)
            if path and path not in sys.path
        ]
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
