"""Run scripts and functions in a process that has the packages of .venv/extras on its path."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import needs, running

PYTHONPATH = f"{running.PYTHONPATH}:{needs.EXTRAS}"


def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script of ours, or of tests, there."""
    return running.python(*words, code=code, timeout=390, PYTHONPATH=PYTHONPATH)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module of ours returns there; both ways as JSON."""
    code = (
        "import importlib, json, sys; module, name, given = sys.argv[1:]; "
        "found = getattr(importlib.import_module(module), name)(*json.loads(given)); "
        "print('\\n' + json.dumps(found))"
    )
    given = json.dumps(arguments, default=str)
    printed = run("-c", code, function.__module__, function.__name__, given).stdout
    return json.loads(printed.splitlines()[-1])


def command(*words: str | Path, code: int = 0) -> str:
    """Run a script as `run` does, and return all that it printed."""
    result = run(*words, code=code)
    return result.stdout + result.stderr
