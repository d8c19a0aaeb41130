"""The writer of a run's checkpoints: in the foreground, or in a thread while training continues."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from armature.checkpoint import directory, storage
from armature.parallel import process_group

log = logging.getLogger(__name__)
_NUMBERS = itertools.count()  # of writers that keep their plans


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
        self._plan = f"{next(_NUMBERS)}" if keeps_plan else None
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None
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
        entries = (entries or {}) | self.entries
        part = storage.prepare(checkpoint, meta)
        writer, written = storage.writer(part)
        complete = partial(self._complete, checkpoint, part, entries, written)
        if self.background:
            self._write_in_background(writer, tensors, complete)
            return
        with storage.expect_single_process():
            try:
                dcp.save(
                    tensors,
                    storage_writer=writer,
                    planner=storage.SavePlanner(keeps=self._plan),
                    process_group=process_group.cpu_group(),
                    no_dist=not dist.is_initialized(),
                )
            except CheckpointException as error:
                raise storage.failure(error) from error
        complete()

    def finish(self) -> None:
        """Wait until the pending save is complete on all ranks, which all call this.

        OSError if it failed on any.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            process_group.on_all_ranks(pending.result)

    def wait(self) -> None:
        """Wait for the pending save without the other ranks, and log its error.

        For a rank that fails.
        """
        pending, self._pending = self._pending, None
        if pending is not None and (error := pending.exception()) is not None:
            log.error("The last checkpoint could not be saved: %s", error)

    def _write_in_background(
        self, writer: dcp.FileSystemWriter, tensors: dict[str, Any], complete: Callable[[], None]
    ) -> None:
        alone = not dist.is_initialized()
        writer.per_thread_copy_ahead = 0  # what it writes is in the CPU's memory
        stager = self._pinned_stager(tensors) if _are_on_gpu(tensors) else None
        if stager is not None:  # torch's stager keeps a 0-dim DTensor itself instead of a copy
            tensors = {
                name: value.detach().clone()
                if isinstance(value, DTensor) and value.ndim == 0
                else value
                for name, value in tensors.items()
            }
        with storage.expect_single_process():
            upload: Any = dcp.async_save(
                tensors,
                storage_writer=writer,
                planner=storage.SavePlanner(keeps=self._plan),
                async_stager=stager,
                process_group=self._group,
                no_dist=alone,
            )
        self._pending = pending = Future[None]()

        def wait_and_complete() -> None:
            try:
                upload.result()  # every rank's part is on disk, or one's error is raised on all
                complete()
                pending.set_result(None)
            except CheckpointException as error:
                pending.set_exception(storage.failure(error))
            except BaseException as error:
                pending.set_exception(error)

        # in a thread of its own: a callback would run in this one if the upload has ended already
        threading.Thread(target=wait_and_complete, name="armature-save").start()

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
        self, checkpoint: Path, part: Path, entries: dict[str, Any], written: directory.FileEntries
    ) -> None:
        with directory.errors_of_store(checkpoint):
            storage.complete(part, checkpoint, entries, written=written, group=self._group)
            if self.on_saved is not None:
                process_group.on_rank_0(partial(self.on_saved, checkpoint), group=self._group)


def _are_on_gpu(tensors: dict[str, Any]) -> bool:
    return any(getattr(value, "is_cuda", False) for value in tensors.values())
