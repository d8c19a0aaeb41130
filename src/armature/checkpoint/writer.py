"""The writer of a run's checkpoints: in the foreground, or in a thread while training continues."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from armature.checkpoint import storage
from armature.parallel import process_group

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Write one checkpoint at a time. It gets its final name only when every rank's part is complete.

    `trainer.save_checkpoint(path, storage_options=writer)` hands it to the strategy, which calls `save`.

    Args:
        background: return from `save` once the tensors are copied into the CPU's memory, and write in a thread. Its
            collectives have a group of their own, since those of training run at the same time.
        entries: what the manifest states about the run, besides what `save` gets.
        on_saved: called on rank 0 with the checkpoint's path once it is complete and has its name; from another thread
            with `background`.
    """

    def __init__(
        self, *, background: bool = False, entries: dict[str, Any] | None = None,
        on_saved: Callable[[Path], None] | None = None,
    ) -> None:  # fmt: skip
        self.background, self.entries, self.on_saved = background, entries or {}, on_saved
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None

    def save(
        self, checkpoint: Path, tensors: dict[str, Any], meta: dict[str, Any], *, entries: dict[str, Any] | None = None
    ) -> None:
        """Write a checkpoint, after waiting for the previous one. Called by all ranks; raises as `finish`.

        `tensors` are this rank's part of weights and optimizer state, and `meta` the rest of Lightning's checkpoint, of
        which rank 0's is written. `entries` go into the manifest, beside files and world size.
        """
        self.finish()
        if self.background and self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # pyright: ignore[reportAttributeAccessIssue]
        entries = (entries or {}) | self.entries
        part = storage.prepare(checkpoint, meta)
        if self.background:
            self._write_in_background(checkpoint, part, tensors, entries)
            return
        with storage.expect_single_process():
            try:
                dcp.save(tensors, storage_writer=storage.writer(part), no_dist=not dist.is_initialized())
            except CheckpointException as error:
                raise storage.failure(error) from error
        self._complete(checkpoint, part, entries)

    def finish(self) -> None:
        """Wait until the pending save is complete on all ranks, which all call this; OSError if it failed on any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            process_group.on_all_ranks(pending.result)

    def wait(self) -> None:
        """Wait for the pending save without the other ranks, and log its error. For a rank that fails."""
        pending, self._pending = self._pending, None
        if pending is not None and (error := pending.exception()) is not None:
            log.error("The last checkpoint could not be saved: %s", error)

    def _write_in_background(
        self, checkpoint: Path, part: Path, tensors: dict[str, Any], entries: dict[str, Any]
    ) -> None:
        alone = not dist.is_initialized()
        with storage.expect_single_process():
            upload = dcp.async_save(
                tensors, storage_writer=storage.writer(part), process_group=self._group, no_dist=alone
            )
        self._pending = pending = Future[None]()

        def complete(uploaded: Future[Any]) -> None:
            try:
                uploaded.result()  # every rank's part is on disk, or the error of one rank is raised on all
                self._complete(checkpoint, part, entries)
                pending.set_result(None)
            except CheckpointException as error:
                pending.set_exception(storage.failure(error))
            except BaseException as error:
                pending.set_exception(error)

        upload.add_done_callback(complete)  # pyright: ignore[reportAttributeAccessIssue]

    def _complete(self, checkpoint: Path, part: Path, entries: dict[str, Any]) -> None:
        storage.complete(part, checkpoint, entries, group=self._group)
        if self.on_saved is not None:
            process_group.on_rank_0(partial(self.on_saved, checkpoint), group=self._group)
