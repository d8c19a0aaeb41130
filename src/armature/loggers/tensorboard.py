"""TensorBoard without a thread: a row of numbers is one event, and several rows are one write.

torch's writer makes an event of each number and gives it to a thread through a queue, which opens the file again for
each. At six numbers a row that is 320 µs of CPU a step; here a row is 20.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

log = logging.getLogger(__name__)


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, with the same arguments; TensorBoard shows the same. A full disk ends it, and not the run.

    Where `save_dir` is an object store, events go through tensorboard's own writer.
    """

    _lost = False

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if any(isinstance(value, dict) for value in metrics.values()):  # several curves in one picture
            self._guarded(lambda: TensorBoardLogger.log_metrics(self, metrics, step))
        elif metrics:
            self.write_rows([{**metrics, "step": step or 0}])

    @rank_zero_only
    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Numbers by name, and the `step` that they belong to."""
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        self._guarded(lambda: self._events().add_rows(rows, prefix=prefix))

    def _events(self) -> Events:
        writer = self.experiment._get_file_writer()  # another one after the logger was closed
        if not isinstance(writer.event_writer, Events):
            writer.event_writer = Events(writer.event_writer)
        return writer.event_writer

    @override
    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._guarded(lambda: TensorBoardLogger.log_hyperparams(self, *args, **kwargs))

    @override
    @rank_zero_only
    def save(self) -> None:
        """The hyperparameters are in the run's config.yaml."""
        self._guarded(lambda: self.experiment.flush())

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._guarded(lambda: TensorBoardLogger.finalize(self, status))

    def _guarded(self, write: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            write()
        except OSError as error:
            self._lost = True
            log.error(
                "TensorBoard's events could not be written (%s). The run goes on without them; metrics.csv has "
                "the same numbers.",
                error,
            )


class Events:
    """In the place of tensorboard's EventFileWriter, whose file it goes on with."""

    def __init__(self, begun: Any) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder: str = begun.get_logdir()
        if "://" in self._folder:
            self._file = self._records = _Passed(begun)
        else:
            begun.close()
            self._file = Path(begun._file_name).open("ab")  # noqa: SIM115 (until `close`)
            self._records = RecordWriter(self._file)
        self._event: Any = event_pb2.Event  # pyright: ignore[reportAttributeAccessIssue]
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]

    def get_logdir(self) -> str:
        return self._folder

    def add_rows(self, rows: Iterable[Mapping[str, Any]], *, prefix: str) -> None:
        now, value_of, summary_of = time.time(), self._summary.Value, self._summary
        for row in rows:
            values = [value_of(tag=prefix + k, simple_value=float(v)) for k, v in row.items() if k != "step"]
            event = self._event(wall_time=now, step=int(row["step"]), summary=summary_of(value=values))
            self._records.write(event.SerializeToString())
        self._file.flush()

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Passed:
    """Serialized events, to tensorboard's writer."""

    def __init__(self, begun: Any) -> None:
        self.write = begun._async_writer.write
        self.flush, self.close = begun.flush, begun.close
