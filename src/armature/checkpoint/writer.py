"""The writer of a run's checkpoints: in the foreground, or in a thread while training continues.

A directory is complete or not there. On a file system everything is written into `<name>.part`,
which is renamed once its manifest is written. An object store cannot rename: there the files get
their final names at once, and the manifest, written last, completes them.
"""

# pyright: reportPrivateImportUsage=false
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options
from typing_extensions import override

from armature.checkpoint import directory, storage
from armature.parallel import process_group

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Write one checkpoint at a time.

    It gets its final name only when every rank's part is complete.

    `trainer.save_checkpoint(path, storage_options=writer)` hands it to the strategy, which calls
    `save`.

    Args:
        background: return from `save` once the tensors are copied into the CPU's memory, and write
            in a thread. Its collectives have a group of their own, since those of training run at
            the same time.
        entries: what the manifest states about the run, besides what `save` gets.
        on_saved: called on rank 0 with the checkpoint's path once it is complete and has its name;
            from another thread with `background`.
        keeps_plan: plan the next save only where tensors have changed their form.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        entries: dict[str, Any] | None = None,
        on_saved: Callable[[Path], None] | None = None,
        keeps_plan: bool = False,
    ) -> None:
        self.background, self.entries, self.on_saved = background, entries or {}, on_saved
        self.keeps_plan = keeps_plan
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[Any] | None = None
        self._stager: BlockingAsyncStager | None = None
        self._staged: dict[str, Any] = {}  # the sizes and types that the stager's memory is for

    def save(
        self,
        checkpoint: Path,
        tensors: dict[str, Any],
        meta: dict[str, Any],
        *,
        entries: dict[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, after waiting for the previous one.

        Called by all ranks; raises as `finish`.

        `tensors` are this rank's part of weights and optimizer state, and `meta` the rest of
        Lightning's checkpoint, of which rank 0's is written. `entries` go into the manifest, beside
        files and world size.
        """
        self.finish()
        if self.background and self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # pyright: ignore[reportAttributeAccessIssue]
        part = directory.part_of(checkpoint)
        with directory.errors_of_store(checkpoint):
            process_group.on_rank_0(partial(_create, part, meta))
        complete = partial(self._complete, part, checkpoint, (entries or {}) | self.entries)
        options: dict[str, Any] = {
            "storage_writer": _Writer(part, complete),
            "planner": DefaultSavePlanner(
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
                enable_plan_caching=self.keeps_plan,
            ),
            "process_group": self._group or process_group.cpu_group(),
            "no_dist": not dist.is_initialized(),
        }
        with storage.expect_single_process(), storage.one_line_errors():
            if self.background:
                on_gpu = any(getattr(value, "is_cuda", False) for value in tensors.values())
                stager = self._pinned_stager(tensors) if on_gpu else None
                # torch's stager keeps 0-dim DTensors as they are, and cannot copy views: gradients
                tensors = {
                    n: v.detach().clone()
                    if isinstance(v, DTensor) and (not v.ndim or v.storage_offset())
                    else v
                    for n, v in tensors.items()
                }
                self._pending = dcp.async_save(tensors, async_stager=stager, **options)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                dcp.save(tensors, **options)

    def finish(self) -> None:
        """Wait until the pending save is complete on all ranks. OSError on all if it failed on any.

        Called by all ranks.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with storage.one_line_errors():
                pending.result()

    def wait(self) -> None:
        """Wait for the pending save, and log its error. For a rank that fails."""
        try:
            self.finish()
        except Exception as error:
            log.error("The last checkpoint could not be saved: %s", error)

    def _pinned_stager(self, tensors: dict[str, Any]) -> BlockingAsyncStager:
        """Return what copies a GPU's tensors into pinned memory, which is kept for the next save.

        It returns when all are copied. Copies that go on during the next step would have to end
        before its forward pass changes a buffer, such as BatchNorm's.
        """
        staged = {
            name: (type(v), getattr(v, "shape", None), getattr(v, "dtype", None))
            for name, v in tensors.items()
        }
        if self._stager is None or staged != self._staged:
            self._stager, self._staged = BlockingAsyncStager(cache_staged_state_dict=True), staged
        return self._stager

    def _complete(
        self, part: Path, checkpoint: Path, entries: dict[str, Any], files: directory.FileEntries
    ) -> None:
        """Publish what all ranks have written. On rank 0."""
        files |= directory.describe(part, [directory.META])
        directory.forget_listing(part)
        # another machine may have written to a disk of its own
        if (problem := directory.files_problem(part, files)) is not None:
            raise OSError(
                f"{part}: {problem}, as rank 0 sees it. All machines must share this folder"
            )
        entries = {"world_size": process_group.ranks(), **entries}
        directory.write_manifest(part, files, entries)
        directory.publish(part, checkpoint)
        if self.on_saved is not None:
            self.on_saved(checkpoint)


def _create(part: Path, meta: dict[str, Any]) -> None:
    directory.remove(part)
    part.mkdir(parents=True)
    storage.write_plain(part / directory.META, meta)
    storage.read_meta(part)  # what cannot be loaded is no checkpoint: better an error now


class _Writer(dcp.FileSystemWriter):
    """torch's writer, which computes checksums while it writes, so that nothing is read back.

    Args:
        complete: called on rank 0 with size and CRC-32 of all ranks' files by name.
    """

    def __init__(self, part: Path, complete: Callable[[directory.FileEntries], None]) -> None:
        super().__init__(str(part))
        storage.use_object_store(self, part)
        self.fs = self._hashed = _HashingFileSystem(self.fs)
        self._complete = complete

    @override
    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        written = super().write_data(*args, **kwargs)
        return written.then(lambda future: (future.value(), self._hashed.written))

    @override
    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, [of_rank for of_rank, _ in results])
        written = [*(files for _, files in results), self._hashed.written]  # with the index
        self._complete({name: entry for files in written for name, entry in files.items()})


class _HashingFileSystem:
    """The file system of torch's writer, local or remote, which describes the files it has written.

    Attributes:
        written: size and CRC-32 by name, as `directory.describe` returns them.
    """

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system
        self.written: directory.FileEntries = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file_system, name)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        before = get_crc32_options()
        with self._file_system.create_stream(path, mode) as stream:
            hashing = _HashingStream(stream)
            try:
                set_crc32_options(False)  # of this thread: one checksum is enough
                yield hashing
            except RuntimeError as error:  # torch.save's own, for a full disk too
                raise hashing.error or error from None
            finally:
                set_crc32_options(before)
        name = PurePath(path).name.removesuffix(".tmp")  # the index is renamed
        self.written[name] = {"bytes": hashing.bytes, "crc32": hashing.crc32}


class _HashingStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.crc32, self.bytes = 0, 0
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def fileno(self) -> int:
        """Flush first: torch asks for the number to sync, while the file's end is still in this
        process's buffer.
        """
        number = self._stream.fileno()  # raises for an object store
        self._stream.flush()
        return number

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except OSError as error:
            self.error = error
            raise
        self.crc32 = zlib.crc32(view, self.crc32)
        self.bytes += len(view)
        return len(view)
