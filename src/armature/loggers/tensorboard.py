"""A TensorBoard logger without a thread: one row of numbers is one event, and the rows of a second
are one write.

torch's writer makes one event of each number and hands it through a queue to a thread, which opens
the file again for each event. With six numbers per row that costs 320 µs of CPU per step; here a
row costs 10 µs. The checksum, which tensorboard computes in Python, would double that.
"""

from __future__ import annotations

import logging
import struct
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from armature.loggers import SECONDS_BETWEEN_WRITES

log = logging.getLogger(__name__)


def _guarded(write: Callable[..., object]) -> Any:
    """Return a method of TensorBoard that writes on rank 0 only, and no more after a write has
    failed.
    """

    @rank_zero_only
    def guarded(self: TensorBoard, *args: Any, **kwargs: Any) -> None:
        try:
            if not self._failed:
                write(self, *args, **kwargs)
        except OSError as error:
            self._failed = True
            log.error(
                "TensorBoard's events could not be written (%s). The run continues without them; "
                "metrics.csv has "
                "the same numbers.", error,
            )  # fmt: skip

    return guarded


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, with the same arguments and the same display in TensorBoard.

    If writing fails, such as on a full disk, logging ends and the run continues. If `save_dir` is
    an object store, events go through tensorboard's own writer.

    Args:
        metric: name of the value that the HPARAMS tab shows beside the hyperparameters; None:
            `hp_metric`, if logged.
    """

    def __init__(
        self,
        save_dir: str | Path,
        *args: Any,
        prefix: str = "",
        metric: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, *args, prefix=prefix, **kwargs)
        self.prefix = f"{prefix}{self.LOGGER_JOIN_CHAR}" if prefix else ""
        self._failed = False
        # hyperparameters until the first row; None after it
        self._early: dict[str, Any] | None = {}
        self._metrics = ["hp_metric" if metric is None else metric]

    @override
    @_guarded
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        # several curves in one chart
        if any(isinstance(value, dict) for value in metrics.values()):
            super().log_metrics(metrics, step)
        elif metrics:
            self.write_rows([{**metrics, "step": step or 0}])

    @_guarded
    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if self._early is not None:
            self._write_early()
        self._event_writer().add_rows(rows, prefix=self.prefix)

    def _event_writer(self) -> EventWriter:
        writer = self.experiment._get_file_writer()  # a new one after the logger was closed
        if not isinstance(writer.event_writer, EventWriter):
            writer.event_writer = EventWriter(writer.event_writer)
        return writer.event_writer

    @override
    @_guarded
    def save(self) -> None:
        """Flush the events. The hyperparameters are in the run's config.yaml."""
        self.experiment.flush()

    @override
    @_guarded
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Write all that come before the first row together with it.

        TensorBoard shows only one set of a run.
        """
        if self._early is None:
            super().log_hyperparams(params, metrics, step)
            return
        self._early |= _flat(vars(params) if isinstance(params, Namespace) else params)
        if metrics is not None:
            measured = metrics if isinstance(metrics, dict) else {"hp_metric": metrics}
            super().log_metrics(measured, step)
            self._metrics += measured

    def _write_early(self) -> None:
        params, self._early = self._early, None
        if params:
            from torch.utils.tensorboard.summary import hparams

            writer = self.experiment._get_file_writer()
            for summary in hparams(params, dict.fromkeys(self._metrics, 0.0)):
                writer.add_summary(summary)

    @override
    @_guarded
    def finalize(self, status: str) -> None:
        self._write_early()
        super().finalize(status)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values below `path` by their full keys, as TensorBoard takes them."""
    if isinstance(value, Mapping):
        return {
            k: v
            for key in value
            for k, v in _flat(value[key], f"{path}/{key}" if path else str(key)).items()
        }
    return {path: value if isinstance(value, (bool, int, float)) else str(value)}


class EventWriter:
    """Replaces tensorboard's EventFileWriter, and continues its file."""

    def __init__(self, replaced: Any) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._folder: str = replaced.get_logdir()
        self._file: Any = replaced  # stays so for an object store
        self._append: Callable[[Any], object] = replaced.add_event
        if "://" not in self._folder:
            replaced.close()
            self._file = Path(replaced._file_name).open("ab")  # noqa: SIM115 (until `close`)
            self._append = lambda event: self._file.write(_record(event.SerializeToString()))
        # time, step and values by tag
        self._waiting: list[tuple[float, int, dict[str, float]]] = []
        self._next_write = 0.0
        self._event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]

    def get_logdir(self) -> str:
        return self._folder

    def add_rows(self, rows: Iterable[Mapping[str, Any]], *, prefix: str) -> None:
        now = time.time()
        for row in rows:  # numbers now: a tensor may change until they are written
            self._waiting.append(
                (
                    now,
                    int(row["step"]),
                    {prefix + k: float(v) for k, v in row.items() if k != "step"},
                )
            )
        if time.monotonic() >= self._next_write:
            self.flush()

    def add_event(self, event: Any) -> None:
        self._append(event)
        self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        value_of, summary_of = self._summary.Value, self._summary
        for wall_time, step, row in waiting:
            values = [value_of(tag=tag, simple_value=value) for tag, value in row.items()]
            self._append(
                self._event(wall_time=wall_time, step=step, summary=summary_of(value=values))
            )
        self._file.flush()
        self._next_write = time.monotonic() + SECONDS_BETWEEN_WRITES

    def close(self) -> None:
        self.flush()
        self._file.close()


def _record(data: bytes) -> bytes:
    """Return an event as TensorFlow frames it: its length and its bytes, each followed by a masked
    CRC-32C.
    """
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_checksum(length), data, _masked_checksum(data)))


def _masked_checksum(data: bytes) -> bytes:
    checksum = google_crc32c.value(data)
    rotated = checksum >> 15 | checksum << 17
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)
