"""Saving while training goes on: the step waits for a copy in the CPU's memory, not for the disk."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from armature.checkpoint import storage
from armature.parallel import process_group


class BackgroundSaver:
    """One save at a time, with the same promise as `checkpoint.save`: a directory has its name when it is complete.

    Its collectives have a group of their own, since those of training run at the same time.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None

    def start(
        self,
        directory: Path,
        tensors: dict[str, Any],
        meta: dict[str, Any],
        *,
        facts: dict[str, Any] | None = None,
        published: Callable[[Path], None] | None = None,
    ) -> None:
        """Copy this rank's part and return; all ranks call it. Waits for the save before, and raises its error.

        Args:
            facts: what the manifest says beside files and world size.
            published: called on rank 0 with the directory, just after the rename, from another thread.
        """
        self.finish()
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # pyright: ignore[reportAttributeAccessIssue]
        part = storage.prepare(directory, meta)
        with storage.single_process_is_meant():
            upload = dcp.async_save(
                tensors,
                storage_writer=storage.writer(part),
                process_group=self._group,
                no_dist=not dist.is_initialized(),
            )
        pending: Future[None] = Future()
        self._pending = pending

        def complete(uploaded: Future[Any]) -> None:
            try:
                uploaded.result()  # all ranks' parts are on disk, or the error of one of them is raised on all
                storage.complete(part, directory, facts or {}, group=self._group)
                if process_group.rank() == 0 and published is not None:
                    published(directory)
                pending.set_result(None)
            except CheckpointException as error:
                pending.set_exception(storage.failure(error))
            except BaseException as error:
                pending.set_exception(error)

        upload.add_done_callback(complete)  # pyright: ignore[reportAttributeAccessIssue]

    def finish(self) -> None:
        """Wait until what was started is complete on all ranks; an error of one is raised on all."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        storage.together(pending.result)
