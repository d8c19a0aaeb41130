"""How checkpoints are read: complete ones only, without running code in them, also while a run that
trains removes some.
"""

# pyright: reportPrivateImportUsage=false
import enum
import io
import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from armature.checkpoint import directory
from armature.errors import ConfigError
from armature.parallel import process_group

try:
    from torch.distributed.checkpoint import FsspecReader  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

log = logging.getLogger(__name__)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise torch's error of many lines as an OSError of one; torch's does not derive from
    Exception either.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, ConfigError | pickle.UnpicklingError | EOFError):
            raise cause from error
        raise OSError(f"rank {rank} failed: {type(cause).__name__}: {cause}") from error


def first_intact(checkpoints: list[Path], *, trust: bool = False) -> Path | None:
    """Return the first checkpoint whose files are what was saved, or None if the list is empty.

    All ranks call it, and each reads a share of the files. If none is intact, that is an error.

    Args:
        trust: accept a directory without a manifest.
    """
    problems: list[str] = []
    for path in process_group.broadcast_object(checkpoints):
        # rank 0 looks for all: another rank may not see a new file yet
        if process_group.broadcast_object(
            directory.is_file(path) or (trust and directory.read_manifest(path) is None)
        ):
            return path
        problem = process_group.broadcast_object(directory.problem(path))
        if problem is None:
            share = (process_group.rank(), process_group.ranks())
            found = process_group.all_gather_object(directory.checksum_problem(path, share=share))
            problem = next(filter(None, found), None)
        if problem is None:
            return path
        problems.append(f"{path}: {problem}.")
        if process_group.rank() == 0:
            log.warning("Checkpoint %s is skipped: %s.", path, problem)
    if problems:
        remedy = "Restore one from a copy, name another, or train anew with another run.name."
        raise ConfigError([*problems, remedy])
    return None


def intact_beside_training(find: Callable[[], list[Path]], *, trust: bool = False) -> Path | None:
    """Return `first_intact` of the checkpoints that `find` lists, again if a run that trains has
    removed some.
    """
    while True:
        found = find()
        try:
            return first_intact(found, trust=trust)
        except ConfigError:
            if found == find():
                raise


def removed(name: str) -> ConfigError:
    return ConfigError(
        f"{name} was removed while it was read: its run trains on and keeps only its newest "
        "checkpoints (checkpoint.keep_last). Type the command again."
    )


# ---------------------------------------------------------------- tensors
@contextmanager
def expect_single_process() -> Iterator[None]:
    """Silence torch's warning about saving and loading without a process group, as one process does
    on purpose.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_tensors(checkpoint: Path, state: dict[str, Any], *, alone: bool = False) -> None:
    """Fill the tensors of `state` from a checkpoint.

    Called by all ranks, or by one of them `alone`.
    """
    try:
        with expect_single_process(), one_line_errors():
            dcp.load(
                state,
                storage_reader=_Reader(checkpoint),
                planner=_PlainValuePlanner(),
                process_group=process_group.cpu_group(),
                no_dist=alone or not dist.is_initialized(),
            )
    except (pickle.UnpicklingError, EOFError) as error:
        raise ConfigError(
            f"{checkpoint}: its tensors cannot be read. Restore it from a copy."
        ) from error


def keep_metadata(checkpoint: Path) -> None:
    """Read the index of a checkpoint's tensors on rank 0, for all reads until `forget_metadata`.

    Called by all ranks. The index of a large model on many ranks takes seconds to parse.
    """
    if checkpoint not in _kept:
        _kept[checkpoint] = process_group.on_rank_0(partial(read_metadata, checkpoint))


def forget_metadata() -> None:
    _kept.clear()


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the names, sizes and types of a checkpoint's tensors."""
    if not (checkpoint / directory.TENSOR_INDEX).is_file():
        raise ConfigError(f"{checkpoint}: no checkpoint (it holds no {directory.TENSOR_INDEX}).")
    return _Reader(checkpoint).read_metadata()


# ---------------------------------------------------------------- plain values
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
    with refusing(name), warnings.catch_warnings():
        # of a file that is refused anyway
        warnings.filterwarnings("ignore", message="Detected pickle protocol|Validating sparse")
        return torch.load(stream, map_location="cpu", weights_only=True)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Raise ConfigError for what torch and pickle raise for a damaged file, or for code in it."""
    try:
        yield
    except (OSError, MemoryError):  # of the disk, the network or this machine
        raise
    except Exception as error:  # a text may be a struct.error
        found = re.search(r"GLOBAL ([\w.]*\w)|^([a-z_]\w*\.[\w.]+)$", str(error), re.IGNORECASE)
        if found is None:
            raise ConfigError(
                f"{name}: it cannot be read: it is damaged, or not what torch.save writes. "
                "Restore it from a copy."
            ) from None
        raise ConfigError(
            f"{name}: refused, since it holds more than tensors and plain values, which would run "
            f"as code on loading ({next(filter(None, found.groups()))})."
        ) from None


_kept: dict[Path, Metadata] = {}
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


class _Properties(TensorProperties):
    """Leaves out what a newer torch says of a tensor: 2.15 its strides, which no reader needs."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state[: len(TensorProperties().__getstate__())])
        self.__class__ = TensorProperties  # pyright: ignore[reportAttributeAccessIssue]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickle what torch.distributed.checkpoint writes into .metadata, and nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_torch_type = module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not is_torch_type and name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        if name == "TensorProperties":
            return _Properties
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration, which Python before 3.11.4 pickles as a getattr."""
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError("builtins.getattr")
    return kind[name]


def use_object_store(torchs: Any, path: Path) -> None:
    """Let a reader or writer of torch's use the object store that a path is in, if it is in one."""
    if not directory.is_local(path):
        reader = FsspecReader(str(path), **path.storage_options)  # pyright: ignore[reportAttributeAccessIssue]
        torchs.fs, torchs.path = reader.fs, reader.path


class _Reader(dcp.FileSystemReader):
    """torch's reader, but .metadata cannot run code."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(str(checkpoint))
        use_object_store(self, checkpoint)
        self._checkpoint = checkpoint

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._checkpoint in _kept:
            return _kept[self._checkpoint]
        name = str(self._checkpoint / directory.TENSOR_INDEX)
        with self.fs.create_stream(name, "rb") as file, refusing(name):
            metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(type(metadata).__name__)
        return metadata


class _PlainValuePlanner(DefaultLoadPlanner):
    """torch's planner, but values that are no tensors may only be plain values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = _load(value, name)
