"""Run scripts in a process that has the packages of .venv/extras on its path."""

import os
import subprocess
import sys
from pathlib import Path

from tests import needs, running

PYTHONPATH = os.pathsep.join(map(str, (running.ROOT / "src", running.ROOT, needs.EXTRAS)))


def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script of ours, or of tests, there."""
    result = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=390,
        env=running.environment(PYTHONPATH=PYTHONPATH),
    )
    assert result.returncode == code, result.stdout[-2000:] + result.stderr[-3000:]
    return result


def command(*words: str | Path, code: int = 0) -> str:
    """Run a script as `run` does, and return all that it printed."""
    result = run(*words, code=code)
    return result.stdout + result.stderr
