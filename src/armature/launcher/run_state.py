"""What the files of a run directory say about the run: running, finished, stopped or failed.

Torch-free.
"""

import json
from pathlib import Path
from typing import Any

from armature.launcher import lock


def read_summary(path: Path) -> dict[str, Any]:
    """Return summary.json if the newest start has written it: each start writes overrides.txt
    first.
    """
    file, typed = path / "summary.json", path / "overrides.txt"
    try:
        if not file.is_file():  # reading a pipe might never end
            return {}
        if typed.exists() and file.stat().st_mtime < typed.stat().st_mtime:
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def state(path: Path, summary: dict[str, Any]) -> str:
    """Return running, finished, stopped (REASON) or failed."""
    reason = summary.get("stop_reason")
    if reason is None:
        return "running" if lock.is_held(path) else "failed"
    return "finished" if reason == "finished" else f"stopped ({reason})"
