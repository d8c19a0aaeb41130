"""Start train.py for tests, on the tiny model and the small corpus of
benchmarks/faults/tiny_run.py.
"""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from armature import hardware
from benchmarks.faults.tiny_run import (
    ROOT,
    TINY,
    environment,
    losses,
    rows,
    summary,
    wait_for,
    write_corpus,
)
from tests import forked

__all__ = ["ROOT", "TINY", "environment", "losses", "rows", "summary", "wait_for", "write_corpus"]


def command(
    *overrides: str, corpus: Path, launcher: list[str] | None = None, tiny: bool = True
) -> list[str]:
    return [
        *(launcher or [sys.executable, str(ROOT / "train.py")]),
        *(TINY if tiny else []),
        f"data.path={corpus}",
        *overrides,
    ]


def train(
    *overrides: str,
    cwd: Path,
    corpus: Path,
    launcher: list[str] | None = None,
    ranks: int | None = None,
    timeout: float = 240,
    check: bool = True,
    fork: bool = True,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end; where it trains in its own process, as a fork that has its imports,
    if `fork`.

    Args:
        ranks: train with so many ranks, which are forks too: where the agent that starts ranks is
            not the subject.
    """
    if ranks is not None:
        overrides = (*overrides, f"trainer.devices={ranks}")
    words, env = command(*overrides, corpus=corpus, launcher=launcher), environment(**extra)
    starts_ranks = launcher is not None or any(
        word.startswith("trainer.devices=") for word in overrides
    )
    fork = fork and (ranks is not None or not starts_ranks)
    result = run(words, cwd=cwd, env=env, timeout=timeout, ranks=ranks or 1, fork=fork)
    if check:
        assert result.returncode == 0, result.stderr[-6000:]
    return result


def run(
    words: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    timeout: float = 240,
    ranks: int = 1,
    fork: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script of ours to its end, as forks that have its imports, if `fork`."""
    if fork and not hardware.gpu_count():  # CUDA does not outlive a fork
        return forked.shared().run(words, cwd=cwd, env=env, timeout=timeout, ranks=ranks)
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def script(name: str, *arguments: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME to its end, without an error."""
    result = run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        cwd=cwd,
        env=environment(**extra),
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return result


def start(*overrides: str, cwd: Path, corpus: Path, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*overrides, corpus=corpus),
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGHUP, signal.SIG_DFL
        ),  # the tests may run under nohup
    )


def family(process: subprocess.Popen) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]
