"""What the files of a run directory say about the run: running, finished, stopped or failed.

Torch-free.
"""

import json
from pathlib import Path
from typing import Any

from armature.launcher import lock

TYPED = "overrides_bytes"  # of summary.json: `typed_bytes` of the start that has written it


def read_summary(path: Path, *, of_any_start: bool = False) -> dict[str, Any]:
    """Return summary.json if the newest start has written it, else nothing: each start lengthens
    overrides.txt first.
    """
    file = path / "summary.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is damaged
        return {}
    newest = found.get(TYPED, typed_bytes(path)) == typed_bytes(path)
    return found if newest or of_any_start else {}


def typed_bytes(path: Path) -> int:
    """Return the length of overrides.txt: no time of a file, which a copy of the run may change."""
    file = path / "overrides.txt"
    return file.stat().st_size if file.is_file() else 0


def state(path: Path, summary: dict[str, Any]) -> str:
    """Return running, finished, stopped (REASON) or failed."""
    reason = summary.get("stop_reason")
    if reason is None:
        return "running" if lock.is_held(path) else "failed"
    return "finished" if reason == "finished" else f"stopped ({reason})"
