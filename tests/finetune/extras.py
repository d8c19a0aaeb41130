"""Run scripts in .venv-extras, the environment that has transformers, peft, timm and
bitsandbytes.
"""

import subprocess
from pathlib import Path

import pytest

from tests import running

PYTHON = running.ROOT / ".venv-extras" / "bin" / "python"


def require(package: str = "transformers") -> None:
    """Skip the test if the environment, or the package in it, is not there."""
    search = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", search]).returncode:
        pytest.skip(f"{package} is not in .venv-extras: make .venv-extras/.installed")


def command(*words: str | Path, code: int = 0) -> str:
    """Run a script of ours, or of tests, there, and return what it printed."""
    environment = running.environment(PYTHONPATH=f"{running.ROOT / 'src'}:{running.ROOT}")
    result = subprocess.run(
        [str(PYTHON), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=390,
        env=environment,
    )
    assert result.returncode == code, result.stdout[-2000:] + result.stderr[-3000:]
    return result.stdout + result.stderr
