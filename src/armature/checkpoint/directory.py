"""The names on disk inside a folder of checkpoints, and which folders in it are complete
checkpoints. Torch-free.

    checkpoints/
      last               the name of the newest complete checkpoint
      step=000120/       a complete checkpoint
        .metadata __0_0.distcp …   tensors, as torch.distributed.checkpoint writes them
        meta.pt          everything else
        manifest.json    written last: sizes and checksums of the other files
      step=000130.part/  a save in progress, or the leftover of a crash
      step=000120.old/   a checkpoint that is being replaced by one with the same name

manifest.json:

    {"format": 1, "step": 120, "samples": 4800, "world_size": 4, "strategy": "…",
     "config_hash": "…", "saved_at": …,
     "files": {"meta.pt": {"bytes": 10240, "crc32": 1234567890}, …}}

A directory without a manifest is half-written, or another program wrote it. The checksums detect
damage. They are no signature: whoever can change the files can change the manifest too.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armature import files
from armature.errors import ConfigError, error_line

MANIFEST = "manifest.json"
META = "meta.pt"
TENSOR_INDEX = ".metadata"  # torch.distributed.checkpoint's name
LAST = "last"
# begins our names of tensors that are no weights, and our entries in meta.pt; nobody else's do
RESERVED = "."
FILE_SUFFIXES = (".ckpt", ".pt", ".pth")  # of a checkpoint in one file, as Lightning writes it
FORMAT = 1
_STEP, _PART, _OLD = "step=", ".part", ".old"
FileEntries = dict[str, dict[str, Any]]


def folder_of(run_dir: Path) -> Path:
    """Return the folder of checkpoints in a run directory (`resume.folder` also considers
    checkpoint.root).
    """
    return run_dir / "checkpoints"


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{_STEP}{step:06d}"


def step_of(path: Path) -> int | None:
    found = re.fullmatch(f"{_STEP}([0-9]+)", path.name)
    return None if found is None else int(found[1])


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the directories that are named as checkpoints by step, complete or not, from the
    oldest to the newest.
    """
    forget_listing(folder)
    named = folder.glob(f"{_STEP}*") if folder.is_dir() else ()
    found = {step: path for path in named if (step := step_of(path)) is not None and path.is_dir()}
    return dict(sorted(found.items()))


def is_named_as_file(path: Path) -> bool:
    """Return whether a path is named like a checkpoint in one file."""
    return path.suffix in FILE_SUFFIXES


def is_file(path: Path) -> bool:
    """Return whether a path is a checkpoint in one file, as Lightning writes it."""
    return is_named_as_file(path) and path.is_file()


def is_local(path: Path) -> bool:
    """Return whether a path is in this machine's file systems rather than in an object store."""
    return getattr(path, "protocol", "") in ("", "file", "local")


def forget_listing(path: Path) -> None:
    """Let an object store be asked again: fsspec keeps listings, while a run that trains saves and
    removes.
    """
    if not is_local(path):
        path.fs.invalidate_cache()  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def errors_of_store(path: Path) -> Iterator[None]:
    """Raise what an object store's client raises as OSError, whatever its classes are.

    Others' errors stay.
    """
    try:
        yield
    except (OSError, ConfigError):
        raise
    except Exception as error:
        if is_local(path):
            raise
        raise OSError(f"{path}: {error_line(error)}") from error


def read_last(folder: Path) -> str | None:
    """Return the name of the newest complete checkpoint, or None if `last` does not exist."""
    file = folder / LAST
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else None


def write_last(folder: Path, name: str) -> None:
    """Let `last` name a checkpoint. Readers see the old name or the new one, never a part of it."""
    if is_local(folder):
        files.replace(folder / LAST, f"{name}\n")
    else:
        (folder / LAST).write_text(f"{name}\n")  # an object store replaces an object as a whole


# ---------------------------------------------------------------- a directory's life
def part_of(checkpoint: Path) -> Path:
    """Return the directory to write a checkpoint's files into: an object store cannot rename it
    afterwards.
    """
    return checkpoint.with_name(f"{checkpoint.name}{_PART}") if is_local(checkpoint) else checkpoint


def publish(part: Path, checkpoint: Path) -> None:
    """Rename a complete directory to its final name.

    An older one of that name is removed only afterwards.
    """
    if part == checkpoint:
        return
    files.sync(part)
    old = checkpoint.with_name(f"{checkpoint.name}{_OLD}")
    if checkpoint.exists() or (is_local(checkpoint) and checkpoint.is_symlink()):
        remove(old)
        checkpoint.rename(old)
    part.rename(checkpoint)
    files.sync(checkpoint.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a directory, its manifest first: what a crash leaves of it is no checkpoint.

    Of a link only the link.
    """
    if is_local(path) and (path.is_symlink() or path.is_file()):
        path.unlink()
        return
    if not path.exists():
        return
    (path / MANIFEST).unlink(missing_ok=True)
    if is_local(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.fs.rm(path.path, recursive=True)  # pyright: ignore[reportAttributeAccessIssue]


def prune(folder: Path, *, keep: set[int]) -> list[int]:
    """Remove the checkpoints of all other steps, and return those steps."""
    surplus = {step: path for step, path in checkpoints_in(folder).items() if step not in keep}
    for path in surplus.values():
        remove(path)
    return [*surplus]


def clear_leftovers(folder: Path) -> None:
    """Remove the leftovers of a crash in the middle of a save."""
    if not folder.is_dir():
        return
    if is_local(folder):
        files.clear_parts(folder)
    for path in list(folder.iterdir()):
        if path.name.startswith(_STEP) and path.name.endswith((_PART, _OLD)):
            replaced = path.with_name(path.name.removesuffix(_OLD))
            if path.suffix == _OLD and not replaced.exists():
                path.rename(replaced)  # the checkpoint that should replace it was never published
            else:
                remove(path)


# ---------------------------------------------------------------- the manifest
def describe(directory: Path, names: Iterable[str]) -> FileEntries:
    """Return size and CRC-32 of files in a directory, read back from where they were written."""
    paths = {name: directory / name for name in names}
    return {
        name: {"bytes": path.stat().st_size, "crc32": files.crc32(path)}
        for name, path in paths.items()
    }


def write_manifest(directory: Path, described: FileEntries, entries: dict[str, Any]) -> None:
    """Write the manifest, which makes the directory a complete checkpoint.

    `entries` are those besides the files.
    """
    text = json.dumps({"format": FORMAT, **entries, "files": described}, indent=1)
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        if is_local(directory):
            os.fsync(file.fileno())


def read_manifest(directory: Path) -> dict[str, Any] | None:
    file = directory / MANIFEST
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else None


def problem(directory: Path) -> str | None:
    """Return why a directory is no complete checkpoint, judged by names and sizes.

    None if it looks complete.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        return f"it holds no readable {MANIFEST}: half-written, or not written by this program"
    if manifest.get("format") != FORMAT:
        return (
            f"its {MANIFEST} has format {manifest.get('format')}, but this version reads "
            f"format {FORMAT} only"
        )
    if lacking := [name for name in (META, TENSOR_INDEX) if name not in manifest["files"]]:
        return f"its {MANIFEST} does not list {lacking[0]}, which every checkpoint has"
    return files_problem(directory, manifest["files"])


def files_problem(directory: Path, described: FileEntries) -> str | None:
    """Return which file is not there in the size that it is described with, or None."""
    for name, entry in described.items():
        path = directory / name
        if not path.is_file():  # reading a device or a pipe might never end
            return f"{name} is {'not a regular file' if path.exists() else 'missing'}"
        if (size := path.stat().st_size) != entry.get("bytes"):
            return f"{name} has {size} bytes, not the {entry.get('bytes')} that were saved"
    return None


def checksum_problem(directory: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """Return which file differs from what was saved, or None if all are intact; with share=(rank,
    n) of every nth.
    """
    # this machine may have another disk under the path
    if (manifest := read_manifest(directory)) is None:
        return f"it holds no readable {MANIFEST}"
    saved, (rank, ranks) = manifest["files"], share
    for name in list(saved)[rank::ranks]:
        try:
            found = describe(directory, [name])[name]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        if found["crc32"] != saved[name].get("crc32"):
            return f"{name} was changed since it was saved (its checksum differs)"
    return None
