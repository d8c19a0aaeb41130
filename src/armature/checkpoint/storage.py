"""How a checkpoint's directory comes to be, and how it is read: complete or not there, and without running its code.

On a file system everything is written into `<name>.part`, which is renamed once its manifest is in it. An object store
has no rename: there the files have their names at once, and the manifest that comes last makes them a checkpoint.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import io
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from armature import files
from armature.checkpoint import manifest
from armature.errors import ConfigError
from armature.parallel import process_group

log = logging.getLogger(__name__)
T = TypeVar("T")
META = "meta.pt"
UNFINISHED = (".part", ".old")  # ends of the names of what a crash may leave behind


# ---------------------------------------------------------------- writing
def prepare(directory: Path, meta: dict[str, Any], *, group: dist.ProcessGroup | None = None) -> Path:
    """A directory to write into that holds meta.pt, on all ranks."""
    part = directory.with_name(f"{directory.name}.part") if manifest.is_local(directory) else directory

    def make() -> None:
        remove(part)
        part.mkdir(parents=True)
        with (part / META).open("wb") as file:
            try:
                torch.save(meta, file)
            except RuntimeError as error:  # what it makes of a full disk
                raise OSError(str(error)) from error
            file.flush()
            if manifest.is_local(part):
                os.fsync(file.fileno())

    on_rank_0(make, group=group)
    return part


def complete(part: Path, directory: Path, facts: dict[str, Any], *, group: dist.ProcessGroup | None = None) -> None:
    """Vouch for what all ranks have written, and give the directory its name. Called by all ranks."""
    rank, ranks = process_group.rank(), process_group.ranks()

    def own() -> manifest.Files:
        return manifest.describe(part, [p.name for p in part.iterdir() if _writer_of(p.name, ranks) == rank])

    written = {name: facts for of_rank in together(own, group=group) for name, facts in of_rank.items()}

    def seal() -> None:
        manifest.write(part, written, {"world_size": ranks, **facts})
        if part != directory:
            files.sync(part)
            publish(part, directory)

    on_rank_0(seal, group=group)


def _writer_of(name: str, ranks: int) -> int:
    """The rank that wrote a file, which has it in its memory still."""
    rank = name.removeprefix("__").partition("_")[0]
    return int(rank) if rank.isdigit() and int(rank) < ranks else 0


def publish(part: Path, directory: Path) -> None:
    """Give a complete directory its name. An older one of that name is gone only after it."""
    old = directory.with_name(f"{directory.name}.old")
    if directory.exists():
        remove(old)
        directory.rename(old)
    part.rename(directory)
    files.sync(directory.parent)
    remove(old)


def remove(directory: Path) -> None:
    """A directory and what is in it, the manifest first: what is left of it by a crash is no checkpoint."""
    if not directory.exists():
        return
    (directory / manifest.NAME).unlink(missing_ok=True)
    if manifest.is_local(directory):
        shutil.rmtree(directory, ignore_errors=True)
    else:
        directory.fs.rm(directory.path, recursive=True)  # pyright: ignore[reportAttributeAccessIssue]


def clear_unfinished(checkpoints: Path) -> None:
    """Remove what a crash in the middle of a save has left."""
    if checkpoints.is_dir():
        if manifest.is_local(checkpoints):
            files.clear_parts(checkpoints)
        for path in list(checkpoints.iterdir()):
            if path.name.startswith("step=") and path.name.endswith(UNFINISHED):
                replaced = path.with_name(path.name.removesuffix(".old"))
                if path.suffix == ".old" and not replaced.exists():
                    path.rename(replaced)  # it was to make room for one that never came
                else:
                    remove(path)


def failure(error: CheckpointException) -> OSError:
    """What torch says in pages, in a line; it does not derive from Exception either."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return OSError(f"rank {rank} failed: {type(cause).__name__}: {cause}")


# ---------------------------------------------------------------- all ranks as one
def together(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's result of `work`, in order of ranks, on all of them. An error of one rank is raised on all."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    message = None if error is None else f"{type(error).__name__}: {error}"
    gathered = process_group.all_gather_object((message, result), group=group)
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(gathered):
        if message is not None:
            raise OSError(f"rank {rank} failed: {message}")
    return [result for _, result in gathered]  # pyright: ignore[reportReturnType]


def on_rank_0(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's result of `work`, on all ranks, once it is done."""
    return together(lambda: work() if process_group.rank() == 0 else None, group=group)[0]  # pyright: ignore[reportReturnType]


def first_sound(paths: list[Path], *, trust: bool = False) -> Path | None:
    """The first checkpoint whose files are what was saved; the ranks read them together. None where there is no path.

    Args:
        trust: take a directory without a manifest as it is.

    Raises:
        ConfigError: where none of them is sound, naming what is wrong with each.
    """
    found: dict[Path, str] = {}
    share = (process_group.rank(), process_group.ranks())
    for path in process_group.broadcast_object(paths):
        problem = process_group.broadcast_object(manifest.problem(path))
        if problem is None:
            problems = together(lambda path=path: manifest.checksum_problem(path, share=share))
            problem = next((text for text in problems if text is not None), None)
        elif trust and manifest.read(path) is None:
            problem = None
        if problem is None:
            return path
        found[path] = problem
        if process_group.rank() == 0:
            log.warning("Checkpoint %s is passed over: %s.", path, problem)
    if found:
        raise ConfigError([f"{path}: {problem}." for path, problem in found.items()])
    return None


# ---------------------------------------------------------------- reading and writing tensors
@contextmanager
def single_process_is_meant() -> Iterator[None]:
    """torch warns of saving and loading without a process group, which is just what one process does."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def writer(part: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(part) if manifest.is_local(part) else FsspecWriter(str(part), **_options(part))  # pyright: ignore[reportReturnType]


def read_tensors(directory: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Fill `state` from a checkpoint, with all ranks or `alone`."""
    with single_process_is_meant():
        try:
            dcp.load(
                state,
                storage_reader=_reader(directory),
                planner=_PlainValues(),
                no_dist=alone or not dist.is_initialized(),
            )
        except CheckpointException as error:
            refused = [cause for cause, _ in error.failures.values() if isinstance(cause, ConfigError)]
            raise (refused[0] if refused else failure(error)) from error


def read_metadata(directory: Path) -> Metadata:
    """What lies in a checkpoint: names, sizes and types.

    Raises:
        FileNotFoundError: where the directory is no checkpoint.
        ConfigError: where its .metadata is more than that.
    """
    if not (directory / ".metadata").is_file():
        raise FileNotFoundError(f"{directory}: no checkpoint (it holds no .metadata).")
    return _reader(directory).read_metadata()


def read_meta(directory: Path) -> dict[str, Any]:
    """What meta.pt holds. Raises as `read_plain`."""
    return read_plain(directory / META)


def read_plain(file: Path) -> dict[str, Any]:
    """Tensors and plain values that torch.save wrote.

    Raises:
        ConfigError: where the file holds anything else, which is not loaded and does not run.
    """
    try:
        with file.open("rb") as stream:
            return torch.load(stream, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ConfigError(f"{file}: {_refusal(error)}") from None


def _refusal(error: Exception) -> str:
    found = re.search(r"GLOBAL ([\w.]*\w)|^([\w.]+)$", str(error))
    what = next(filter(None, found.groups())) if found else "not what torch.save writes"
    return f"refused, since it holds more than tensors and plain values, which would run as code on loading ({what})."


def _options(path: Path) -> dict[str, Any]:
    return dict(getattr(path, "storage_options", {}))


def _reader(directory: Path) -> dcp.FileSystemReader:
    return _Reader(directory) if manifest.is_local(directory) else _RemoteReader(str(directory), **_options(directory))  # pyright: ignore[reportReturnType]


_IN_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}  # fmt: skip


class _PlainMetadata(pickle.Unpickler):
    """Unpickles what torch.distributed.checkpoint writes into .metadata, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        a_type = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if not a_type and name not in _IN_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


class _ReadsPlainMetadata:
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))  # pyright: ignore[reportAttributeAccessIssue]
        with self.fs.create_stream(path, "rb") as file:  # pyright: ignore[reportAttributeAccessIssue]
            try:
                metadata = _PlainMetadata(file).load()
            except pickle.UnpicklingError as error:
                raise ConfigError(f"{path}: {_refusal(error)}") from None
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # pyright: ignore[reportAttributeAccessIssue]
        return metadata


class _Reader(_ReadsPlainMetadata, dcp.FileSystemReader):
    """torch's, but .metadata is not a pickle that may run anything."""


class _RemoteReader(_ReadsPlainMetadata, FsspecReader):
    """The same for object stores."""


class _PlainValues(DefaultLoadPlanner):
    """torch's, but values that are no tensors are read as plain ones."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{read_item.dest_index.fqn}: {_refusal(error)}") from None
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
