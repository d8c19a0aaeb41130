"""The project that a command works on, and what the library ships. Torch-free.

In a clone they are the same. An installed library has `configs/` and `scripts/` inside its own
folder, and the project is the nearest folder above that has a configs/train.yaml.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_CLONE = PACKAGE.parents[1]


def shipped(name: str) -> Path:
    """Return a folder of the library: of a clone's root, or inside the installed package."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else _CLONE / name


def _is_project(folder: Path) -> bool:
    return (folder / "configs" / "train.yaml").is_file()


def _root() -> Path:
    """Return the project's folder: the current one if no folder above it is a project."""
    # the command `armature` sets the variable, and its processes inherit it
    usual = _CLONE if _is_project(_CLONE) else Path.cwd()
    start = Path(os.environ.get("ARMATURE_PROJECT") or usual)
    return next(filter(_is_project, (start, *start.parents)), start)


ROOT = _root()
SOURCES = ROOT / "src"  # packages of the project's own
IMPORTED = [str(SOURCES), str(ROOT)]  # from where every process imports
SHIPPED = shipped("configs")
CONFIGS = ROOT / "configs" if (ROOT / "configs").is_dir() else SHIPPED
FOLDERS = [*dict.fromkeys([CONFIGS, SHIPPED])]  # the project's own files come first


def config_file(group: str, name: str, folders: Sequence[Path] = ()) -> Path | None:
    """Return the file of a group's option, or None if there is no such option."""
    files = (folder / group / f"{name}.yaml" for folder in folders or FOLDERS)
    return next(filter(Path.is_file, files), None)


def options(group: str, folders: Sequence[Path] = ()) -> dict[str, Path]:
    """Return the file of each option of a group, in the order of their names; a file whose name
    begins with _ is a part of others.
    """
    found = {
        f.stem: f
        for folder in (folders or FOLDERS)[::-1]
        for f in (folder / group).glob("[!_]*.yaml")
    }
    return dict(sorted(found.items()))


def as_typed(text: str) -> str:
    """Return a text with its commands as they are typed here: a project's folder has no scripts/,
    but the command `armature`.
    """
    if (ROOT / "scripts").is_dir():
        return text
    return re.sub(r"(python )?scripts/(\w+)\.py", r"armature \2", text)
