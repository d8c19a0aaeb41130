"""Start train.py for tests, on the tiny model and the small corpus of benchmarks/faults/tiny_run.py."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.faults.tiny_run import ROOT, TINY, environment, losses, rows, summary, wait_for, write_corpus

__all__ = ["ROOT", "TINY", "environment", "losses", "rows", "summary", "wait_for", "write_corpus"]


def command(*overrides: str, corpus: Path, launcher: list[str] | None = None, tiny: bool = True) -> list[str]:
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
    timeout: float = 240,
    check: bool = True,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(*overrides, corpus=corpus, launcher=launcher),
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
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
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )


def family(process: subprocess.Popen) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]
