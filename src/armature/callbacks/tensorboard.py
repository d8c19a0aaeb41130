"""TensorBoard with one event for each row, not one for each number: 40 µs of CPU a row of six numbers, not 320."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

log = logging.getLogger(__name__)

QUEUE = 1000  # events that wait for the writing thread; with torch's 10, each write of a few rows waits for that thread


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, with the same arguments and files. A full disk ends it, and not the run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_queue": QUEUE, **kwargs})
        self._lost = False

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self._lost or not metrics:
            return
        if any(isinstance(value, dict) for value in metrics.values()):
            return super().log_metrics(metrics, step)
        # not before it is used: it takes a while
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        values = [Summary.Value(tag=prefix + name, simple_value=float(value)) for name, value in metrics.items()]
        self._guarded(lambda: self.experiment._get_file_writer().add_summary(Summary(value=values), step))

    @override
    @rank_zero_only
    def save(self) -> None:
        self._guarded(super().save)

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._guarded(lambda: super(TensorBoard, self).finalize(status))

    def _guarded(self, write: Callable[[], object]) -> None:
        """Calls `write` unless an earlier one failed. The writing thread's errors come out at the next call."""
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
