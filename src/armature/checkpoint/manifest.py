"""What a complete checkpoint consists of: manifest.json, the last file that is written into it. Torch-free.

    {"format": 1, "step": 120, "world_size": 4, "strategy": "…", "config_hash": "…", "saved_at": …,
     "files": {"meta.pt": {"bytes": 10240, "sha256": "…"}, …}}

A directory without one was left half-written, or is another program's. The checksums tell damage; they are no
signature, since whoever can change the files can change the manifest too.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from armature import files

NAME = "manifest.json"
FORMAT = 1
Files = dict[str, dict[str, Any]]


def describe(directory: Path, names: Iterable[str]) -> Files:
    """Size and SHA-256 of files in a directory, read back from where they were written."""
    found: Files = {}
    for name in names:
        path = directory / name
        found[name] = {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
    return found


def write(directory: Path, described: Files, facts: dict[str, Any]) -> None:
    """Vouch for the files: from now on the directory is a complete checkpoint."""
    text = json.dumps({"format": FORMAT, **facts, "files": dict(sorted(described.items()))}, indent=1)
    with (directory / NAME).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        if is_local(directory):
            os.fsync(file.fileno())


def read(directory: Path) -> dict[str, Any] | None:
    """The manifest, or None where the directory has none that can be read."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else None


def problem(directory: Path) -> str | None:
    """Why a directory is no complete checkpoint, told from names and sizes; None where it looks like one."""
    manifest = read(directory)
    if manifest is None:
        return f"it holds no readable {NAME}: half-written, or not written by this program"
    if manifest.get("format") != FORMAT:
        return f"its {NAME} is of format {manifest.get('format')}, which this version does not know (it knows {FORMAT})"
    for name, facts in manifest["files"].items():
        try:
            size = (directory / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != facts["bytes"]:
            return f"{name} has {size} bytes, not the {facts['bytes']} that were saved"
    return None


def checksum_problem(directory: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """Which file is not what was saved; None where all are.

    Args:
        share: (rank, ranks): this rank reads every ranks-th file only.
    """
    saved = (read(directory) or {"files": {}})["files"]
    rank, ranks = share
    for name in list(saved)[rank::ranks]:
        if describe(directory, [name])[name]["sha256"] != saved[name]["sha256"]:
            return f"{name} was changed since it was saved (its checksum differs)"
    return None


def is_local(path: Path) -> bool:
    """Whether a path is of this machine's file systems, and not an object store's."""
    return getattr(path, "protocol", "") in ("", "file", "local")
