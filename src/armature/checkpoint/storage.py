"""How a checkpoint is written and read: a directory is complete or not there, and reading it never
runs its code.

On a file system everything is written into `<name>.part`, which is renamed once its manifest is
written. An object
store cannot rename: there the files get their final names at once, and the manifest, written last,
completes them.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import io
import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from armature.checkpoint import directory
from armature.checkpoint.hashing import HashingFileSystem
from armature.errors import ConfigError
from armature.parallel import process_group

log = logging.getLogger(__name__)
_TRIES = 10  # to find a checkpoint that a run that trains does not remove meanwhile


def prepare(checkpoint: Path, meta: dict[str, Any]) -> Path:
    """Create a directory to write into, with meta.pt in it, and return it. Called by all ranks."""
    part = directory.part_of(checkpoint)

    def create() -> None:
        directory.remove(part)
        part.mkdir(parents=True)
        write_plain(part / directory.META, meta)
        read_meta(part)  # what cannot be loaded is no checkpoint: better an error now

    with directory.errors_of_store(checkpoint):
        process_group.on_rank_0(create)
    return part


def complete(
    part: Path,
    checkpoint: Path,
    entries: dict[str, Any],
    *,
    written: directory.FileEntries,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the manifest of what all ranks have written, and publish the directory.

    Called by all ranks.

    `written` describes files of this rank, which are not read again.
    """
    rank, ranks = process_group.rank(), process_group.ranks()

    def describe_own() -> directory.FileEntries:
        for name, entry in written.items():
            if (size := (part / name).stat().st_size) != entry["bytes"]:
                raise OSError(
                    f"{part / name} has {size} bytes, but {entry['bytes']} were written to it"
                )
        return written | (directory.describe(part, [directory.META]) if rank == 0 else {})

    described = process_group.on_all_ranks(describe_own, group=group)

    def publish() -> None:
        files = {name: entry for of_rank in described for name, entry in of_rank.items()}
        # another machine may have written to a disk of its own
        if (
            directory.is_local(part)
            and (problem := directory.files_problem(part, files)) is not None
        ):
            raise OSError(
                f"{part}: {problem}, as rank 0 sees it. All machines must share this folder"
            )
        directory.write_manifest(part, files, {"world_size": ranks, **entries})
        directory.publish(part, checkpoint)

    process_group.on_rank_0(publish, group=group)


def failure(error: CheckpointException) -> OSError:
    """Return torch's error of many lines as one line; torch's does not derive from Exception
    either.
    """
    rank, (cause, _) = next(iter(error.failures.items()))
    return OSError(f"rank {rank} failed: {type(cause).__name__}: {cause}")


def first_intact(checkpoints: list[Path], *, trust: bool = False) -> Path | None:
    """Return the first checkpoint whose files are what was saved, or None if the list is empty.

    All ranks call it, and each reads a share of the files. If none is intact, that is an error.

    Args:
        trust: accept a directory without a manifest.
    """
    problems: dict[Path, str] = {}
    share = (process_group.rank(), process_group.ranks())
    for path in process_group.broadcast_object(checkpoints):
        # one of Lightning's, which no manifest describes
        if process_group.broadcast_object(directory.is_file(path)):
            return path
        problem = process_group.broadcast_object(directory.problem(path))
        if problem is None:
            found = process_group.on_all_ranks(
                lambda path=path: directory.checksum_problem(path, share=share)
            )
            problem = process_group.broadcast_object(next(filter(None, found), None))
        elif trust and directory.read_manifest(path) is None:
            return path
        if problem is None:
            return path
        problems[path] = problem
        if process_group.rank() == 0:
            log.warning("Checkpoint %s is skipped: %s.", path, problem)
    if problems:
        remedy = (
            "Restore one of them from a copy, or name another."
            if len(problems) > 1
            else "Restore it from a copy."
        )
        raise ConfigError([*(f"{path}: {problem}." for path, problem in problems.items()), remedy])
    return None


def intact_beside_training(find: Callable[[], list[Path]], *, trust: bool = False) -> Path | None:
    """Return `first_intact` of the checkpoints that `find` lists, again if a run that trains has
    removed some.
    """
    found: list[Path] = []
    for _ in range(_TRIES):
        found = find()
        try:
            return first_intact(found, trust=trust)
        except ConfigError:
            if found == find():
                raise
    raise removed(found[0].name)


@contextmanager
def reading_beside_training(checkpoint: Path) -> Iterator[None]:
    """Raise a ConfigError that says so if a checkpoint is removed while it is read."""
    try:
        yield
    except (OSError, ConfigError) as error:
        directory.forget_listing(checkpoint)
        if checkpoint.exists():
            raise
        raise removed(checkpoint.name) from error


def removed(name: str) -> ConfigError:
    return ConfigError(
        f"{name} was removed while it was read: its run trains on and keeps only its newest "
        "checkpoints "
        "(checkpoint.keep_last). Type the command again."
    )


# ---------------------------------------------------------------- reading and writing tensors
@contextmanager
def expect_single_process() -> Iterator[None]:
    """Silence torch's warning about saving and loading without a process group, as one process does
    on purpose.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def writer(part: Path) -> tuple[dcp.FileSystemWriter, directory.FileEntries]:
    """Return torch's writer, and what will describe the files that it has written."""
    options: dict[str, Any] = getattr(part, "storage_options", {})
    writer: Any = (
        dcp.FileSystemWriter(part)
        if directory.is_local(part)
        else FsspecWriter(str(part), **options)
    )
    writer.fs = hashed = HashingFileSystem(writer.fs)
    return writer, hashed.written


class SavePlanner(DefaultSavePlanner):
    """torch's planner for a flat dict of tensors and plain values.

    Args:
        keeps: name of the plan to keep for the next save: ranks whose part has not changed send
            nothing, and rank 0 plans anew only for what has. None: no plan is kept.
    """

    def __init__(self, *, keeps: str | None) -> None:
        super().__init__(
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            enable_plan_caching=keeps is not None,
        )
        # torch keeps plans by class; another writer's may be of other ranks
        self._cached_plans_key = keeps or ""


def read_tensors(checkpoint: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Fill the tensors of `state` from a checkpoint.

    Called by all ranks, or by one of them `alone`.
    """
    with expect_single_process():
        try:
            no_dist = alone or not dist.is_initialized()
            dcp.load(
                state,
                storage_reader=_reader(checkpoint),
                planner=_PlainValuePlanner(),
                process_group=process_group.cpu_group(),
                no_dist=no_dist,
            )
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if any(isinstance(cause, pickle.UnpicklingError | EOFError) for cause in causes):
                raise ConfigError(
                    f"{checkpoint}: its tensors cannot be read. Restore it from a copy."
                ) from error
            refused = [cause for cause in causes if isinstance(cause, ConfigError)]
            raise (refused[0] if refused else failure(error)) from error


def keep_metadata(checkpoint: Path) -> None:
    """Read the index of a checkpoint's tensors on rank 0, for all reads until `forget_metadata`.

    Called by all ranks. The index of a large model on many ranks takes seconds to parse.
    """
    reader: Any = _reader(checkpoint)
    path = str(reader._get_metadata_path())
    if path not in _kept:
        _kept[path] = process_group.on_rank_0(reader.read_metadata)


def forget_metadata() -> None:
    _kept.clear()


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the names, sizes and types of a checkpoint's tensors."""
    if not (checkpoint / directory.TENSOR_INDEX).is_file():
        raise FileNotFoundError(
            f"{checkpoint}: no checkpoint (it holds no {directory.TENSOR_INDEX})."
        )
    return _reader(checkpoint).read_metadata()


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors.

    Raises ConfigError if it is damaged, or holds code.
    """
    file = checkpoint / directory.META
    meta = read_plain(file)
    if not isinstance(meta, dict):
        raise ConfigError(f"{file}: it holds a {type(meta).__name__}, not a checkpoint's entries.")
    return meta


def write_plain(file: Path, value: Any) -> None:
    """Write a value with torch.save, and sync it. Raises OSError, also for a full disk."""
    with file.open("wb") as stream:
        try:
            torch.save(value, stream)
        except RuntimeError as error:  # torch reports a full disk as one
            raise OSError(str(error)) from error
        stream.flush()
        if directory.is_local(file):
            os.fsync(stream.fileno())


def read_plain(file: Path) -> Any:
    """Return the tensors and plain values that torch.save wrote.

    Anything else is an error, and is not run.
    """
    try:
        with file.open("rb") as stream:
            return _load(stream, str(file))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}.") from None


def dumped(value: Any) -> bytes:
    """Return a plain value as bytes, which torch.distributed.checkpoint keeps as they are."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def loaded(value: bytes) -> Any:
    """Return what `dumped` made bytes of."""
    return _load(io.BytesIO(value), "a value")


def _load(stream: Any, name: str) -> Any:
    try:
        with warnings.catch_warnings():
            # of a file that is refused anyway
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(stream, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        EOFError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ConfigError(f"{name}: {_refusal(error)}") from None


def _refusal(error: Exception) -> str:
    found = re.search(r"GLOBAL ([\w.]*\w)|^([a-z_]\w*\.[\w.]+)$", str(error), re.IGNORECASE)
    if found is None:
        return (
            "it cannot be read: it is damaged, or not what torch.save writes. Restore it from "
            "a copy."
        )
    cause = next(filter(None, found.groups()))
    return (
        "refused, since it holds more than tensors and plain values, which would run as code "
        f"on loading ({cause})."
    )


def _reader(checkpoint: Path) -> dcp.FileSystemReader:
    if directory.is_local(checkpoint):
        return _Reader(checkpoint)
    return _RemoteReader(str(checkpoint), **checkpoint.storage_options)  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]


_kept: dict[str, Metadata] = {}
_METADATA_CLASSES = {  # by module: what .metadata may name
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickle what torch.distributed.checkpoint writes into .metadata, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        is_torch_type = module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not is_torch_type and name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


class _PlainMetadataReader:
    """Read .metadata with `_MetadataUnpickler` instead of pickle.load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))  # pyright: ignore[reportAttributeAccessIssue]
        if str(path) in _kept:
            return _kept[str(path)]
        with self.fs.create_stream(path, "rb") as file:  # pyright: ignore[reportAttributeAccessIssue]
            try:
                metadata = _MetadataUnpickler(file).load()
            except (
                pickle.UnpicklingError,
                EOFError,
                ValueError,
                TypeError,
                AttributeError,
                IndexError,
            ) as error:
                raise ConfigError(f"{path}: {_refusal(error)}") from None
        if not isinstance(metadata, Metadata):
            raise ConfigError(
                f"{path}: it holds a {type(metadata).__name__}, not an index of tensors. Restore "
                "it."
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # pyright: ignore[reportAttributeAccessIssue]
        return metadata


class _Reader(_PlainMetadataReader, dcp.FileSystemReader):
    """torch's reader, but .metadata cannot run code."""


class _RemoteReader(_PlainMetadataReader, FsspecReader):
    """The same for object stores."""


class _PlainValuePlanner(DefaultLoadPlanner):
    """torch's planner, but values that are no tensors may only be plain values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = _load(value, name)
