"""Interleaved blocks of steps.

A B C, C B A, … so that disturbances of the machine affect all contenders alike.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks.contender import Contender, ContenderFailed, Running

FEWEST = 3  # rounds that have quartiles worth the name

T = TypeVar("T")


@dataclass
class Record:
    """One contender's measurements.

    Attributes:
        seconds: of a step, a value a round; the mean over the round's block.
        cpu_seconds: the same in the CPU's time, which a busy machine disturbs less.
        faults: page faults of a step, likewise.
        note: why there are none, or nothing.
    """

    name: str
    ranks: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    peak: int = 0
    note: str = ""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles of at least one value.

    Raises:
        ValueError: of none.
    """
    if not values:
        raise ValueError("a median needs at least one value")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(record: Record, reference: Record) -> list[float]:
    """Return steps per second relative to the reference, per round.

    Both were measured within seconds of each other.
    """
    return [b / a for a, b in zip(record.seconds, reference.seconds, strict=False)]


class Rounds:
    """Measure contenders round by round.

    One that fails gets a note instead of results, and the others continue.

    Args:
        block_seconds: what a block should take; its steps are a multiple of `multiple`, the logging
            interval.
        say: takes a line of progress.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        folder: Path,
        *,
        block_seconds: float,
        multiple: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.contenders, self.folder, self.say = contenders, folder, say
        self.block_seconds, self.multiple = block_seconds, multiple
        self.records = {c.name: Record(c.name, c.ranks, note=c.missing or "") for c in contenders}
        self._running: dict[str, Running] = {}
        self._steps: dict[str, int] = {}

    def together(self, rounds: int, *, end: float = math.inf) -> list[Record]:
        """Measure contenders that are all alive at once and take turns.

        After FEWEST rounds, the last one is the one after which another would last beyond `end`, in
        time.monotonic().
        """
        try:
            for contender in self.contenders:
                self._start(contender)
            begin = time.monotonic()
            for number in range(rounds):
                now = time.monotonic()
                if number >= FEWEST and now + (now - begin) / number > end:
                    break
                for name in _turn(list(self._running), number):
                    self._measure(name)
                took = (
                    f"{name} {self.records[name].seconds[-1] * 1e3:.4g}" for name in self._running
                )
                self.say(f"round {number + 1} of {rounds}, ms a step: {', '.join(took)}")
        finally:
            for entrant in self._running.values():
                entrant.stop()
        return list(self.records.values())

    def _start(self, contender: Contender) -> None:
        name, record = contender.name, self.records[contender.name]
        if record.note:
            return
        self.say(f"starting {name}")
        self._running[name] = entrant = Running(contender, self.folder)
        try:
            entrant.wait_for_first_step()
            self._steps[name] = self._calibrated(entrant)
        except ContenderFailed as error:
            self._failed(name, error)

    def _calibrated(self, entrant: Running) -> int:
        """Return the steps of a block.

        The steps that determine it are the warm-up, of at least half a block's time.
        """
        end = time.monotonic() + self.block_seconds / 2
        entrant.block(self.multiple)
        block = entrant.block(self.multiple)
        while time.monotonic() < end:
            block = entrant.block(self.multiple)
        return self.multiple * max(1, round(self.block_seconds / block.seconds))

    def _measure(self, name: str) -> None:
        if name not in self._running:
            return
        record = self.records[name]
        try:
            block = self._running[name].block(self._steps[name])
        except ContenderFailed as error:
            self._failed(name, error)
            return
        record.seconds.append(block.seconds / block.steps)
        record.cpu_seconds.append(block.cpu_seconds / block.steps)
        record.faults.append(block.faults / block.steps)
        record.peak = max(record.peak, block.peak)

    def _failed(self, name: str, error: ContenderFailed) -> None:
        self.records[name].note = f"failed: {error}"
        self.say(f"{name} failed: {error}")
        self._running.pop(name).stop()


def _turn(items: Sequence[T], number: int) -> Sequence[T]:
    """Reverse every second round, so that no contender always follows the same one."""
    return items if number % 2 == 0 else items[::-1]
