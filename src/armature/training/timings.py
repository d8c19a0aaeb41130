"""Measure how fast a run is and how long it waits for data: values that depend on the clock
(timings.csv).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer

from armature.training.metrics_csv import MetricsCSV

MAX_DATA_WAIT = 0.05  # share of the time; a longer wait for data is reported
UNAVOIDABLE_SECONDS = 1e-3  # per batch: receiving one from another process takes as long
OWN_SECONDS = "own_seconds_per_step"  # the column
REMEDY = (
    "Raise data.num_workers, or that of your DataLoader. If all CPUs load data already, decode, "
    "resize or tokenize samples once, and only read the result while training."
)
WARM_UP_STEPS = 20  # caches fill, kernels are chosen, processes start
JUDGED_SECONDS = 30.0  # behind them, before a long wait is reported


@dataclass(frozen=True)
class Window:
    """The optimizer steps between two writes, on this rank.

    Times are seconds summed over the steps.
    """

    steps: int
    samples: int  # of all ranks
    seconds: float
    data_wait: float


class TimingsCSV(MetricsCSV):
    """timings.csv: a row per write, beside metrics.csv."""

    name_on_disk, keeps_newest = "timings.csv", False


class Marks:
    """Points in time on the device's own clock.

    A GPU lags behind the host, so its marks are read later.

    `mark` takes one or two microseconds and never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._newest: torch.cuda.Event | None = None
        self.mark: Callable[[], Any] = self._record if self._on_gpu else time.perf_counter

    def _record(self) -> torch.cuda.Event:
        self._newest = event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Return the time between two marks. Call `settle` first."""
        return first.elapsed_time(second) / 1e3 if self._on_gpu else second - first

    def settle(self) -> None:
        """Wait until the device has reached the newest mark."""
        if self._newest is not None:
            self._newest.synchronize()


class DataWait:
    """How long the device was idle because the next batch was not ready.

    On a CPU that is the time in the loader's `next`. On a GPU it is the time in `next`, but at most
    the time for which the GPU was idle: a slow loader costs nothing while the GPU still has work.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.marks = Marks(trainer.strategy.root_device)
        self.on_gpu = trainer.strategy.root_device.type == "cuda"
        self._fetching = 0.0  # seconds in the loader's `next`
        self._began = 0.0
        self._waited = 0.0
        self._last: Any = None  # when the device reached the end of the batch before
        self._gaps: list[tuple[Any, Any, float]] = []

    def fetch_started(self) -> None:
        self._began = time.perf_counter()

    def fetch_ended(self) -> None:
        self._fetching += time.perf_counter() - self._began
        if not self.on_gpu:
            return
        if self._last is None:  # the device had no work before
            self._waited += self._fetching
        else:
            self._gaps.append((self._last, self.marks.mark(), self._fetching))
        self._fetching = 0.0

    def batch_ended(self) -> None:
        """Mark the end of a batch, which only a GPU has not reached yet."""
        self._last = self.marks.mark()

    def read(self) -> float:
        """Return the seconds waited since the last call. On a GPU, wait for the end of the step."""
        self.marks.settle()
        waited = self._waited + self._fetching
        for end, start, fetching in self._gaps:
            waited += min(fetching, self.marks.seconds(end, start))
        self.clear()
        return waited

    def clear(self) -> None:
        """Discard the time waited since the last call of `read`."""
        self._gaps, self._last, self._fetching, self._waited = [], None, 0.0, 0.0


class OwnWork:
    """The time that this rank takes for its part of a batch: from its begin to its first backward.

    Under ddp no collective lies in it, so a rank that needs longer than the others slows them down.
    With sharded weights it contains the forward's gathers.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks, self._began = marks, None
        self._parts: list[tuple[Any, Any]] = []

    def batch_began(self) -> None:
        self._began = self._marks.mark()

    def backward_begins(self) -> None:
        if self._began is not None:
            self._parts.append((self._began, self._marks.mark()))
            self._began = None

    def read(self) -> float:
        """Return the seconds since the last call. Call `Marks.settle` first."""
        parts, self._parts, self._began = self._parts, [], None
        return sum(self._marks.seconds(*part) for part in parts)


class Totals:
    """Time-weighted means over a run, and the maximum for memory; without the warm-up in runs that
    outlast it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._steps = 0

    def add(self, values: dict[str, float], *, window: Window) -> None:
        if self._steps < WARM_UP_STEPS:
            self._sums.clear()
        self._steps += window.steps
        for name, value in values.items():
            have = self._sums.setdefault(name, [0.0, 0.0])
            if name.startswith("memory/"):
                have[:] = [max(have[0], value), 1.0]
            elif math.isfinite(value):
                have[0] += value * window.seconds
                have[1] += window.seconds

    def values(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}

    def waiting(self, *, batches: int) -> str | None:
        """Return what to do about a long wait for data, once enough was seen to judge it.

        Args:
            batches: of a step, on each rank.
        """
        values, seconds = self.values(), self._sums["data_wait"][1]
        share = values["data_wait"]
        wait = share * values["seconds_per_step"] / batches
        if share <= MAX_DATA_WAIT or wait < UNAVOIDABLE_SECONDS or seconds < JUDGED_SECONDS:
            return None
        return f"{share:.0%} of the time is waiting for data, {wait:.3g} s per batch. {REMEDY}"


def over_ranks(name: str, values: list[float]) -> float:
    """Combine the ranks' values: a step waits for the slowest rank and fails on the fullest one."""
    return (
        max(values)
        if name in ("data_wait", OWN_SECONDS) or name.startswith("memory/")
        else sum(values) / len(values)
    )
