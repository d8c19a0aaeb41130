"""A file of results, one line per comparison, and what its newest lines say about the code's speed.

A line holds the ratio of our steps per second to another program's: it depends on the machine far
less than seconds do.
Lines are compared within a series: the same machine, torch, work and opponent.
"""

import fcntl
import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.job import Job
from benchmarks.rounds import Spread, spread


@dataclass(frozen=True, kw_only=True)
class Result:
    """One comparison of one run: our steps per second relative to `row`'s, and what was compared
    where.

    Attributes:
        date: UTC, YYYY-MM-DDTHH:MM:SSZ.
        commit: of the code, or an empty string outside of a repository; `dirty` if a tracked file
            was changed since.
        machine: CPU or GPU and how many.
        work: `fingerprint` of the job.
        row: the other program.
        ratio, low, high: median and quartiles of the rounds.
    """

    date: str
    commit: str
    dirty: bool
    machine: str
    torch: str
    work: str
    row: str
    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def series(self) -> tuple[str, str, str, str]:
        return (self.machine, self.torch, self.work, self.row)


def fingerprint(job: Job) -> str:
    """Return a hash of the work that is measured; where the tokens lie is no part of it."""
    text = json.dumps(asdict(job) | {"tokens": job.tokens is not None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def append(file: Path, results: Iterable[Result]) -> None:
    """Add lines in one write, so that two processes may append at the same time.

    A line that was cut off is ended first, so that it spoils no other.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(result)) + "\n" for result in results).encode()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = b"\n" + text
        while text:
            text = text[os.write(descriptor, text) :]
    finally:
        os.close(descriptor)


def read(files: Iterable[Path]) -> tuple[list[Result], list[str]]:
    """Return the results of all files by date, without repetitions, and a line about each line that
    is damaged.
    """
    results: dict[Result, None] = {}
    problems = []
    for file in files:
        if not file.exists():
            continue
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                results[_parsed(line)] = None
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                problems.append(f"{file}:{number} is damaged and left out: {error}")
    return sorted(results, key=lambda result: result.date), problems


def _parsed(line: bytes) -> Result:
    """Raise ValueError or TypeError for a line that is no result.

    Keys of a later version are left out.
    """
    values: dict[str, Any] = json.loads(line.decode())
    if not isinstance(values, dict):
        raise TypeError(f"an object is expected. Got {values!r:.60}")
    types = {field.name: field.type for field in fields(Result)}
    if missing := types.keys() - values.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    kept: dict[str, Any] = {
        name: float(values[name]) if kind is float else values[name] for name, kind in types.items()
    }
    for name, kind in types.items():
        assert isinstance(kind, type)
        if not isinstance(kept[name], kind) or (kind is float and not math.isfinite(kept[name])):
            raise ValueError(f"{name}={values[name]!r} is impossible")
    return Result(**kept)


@dataclass(frozen=True)
class Verdict:
    """The newest result of a series, compared with all earlier ones.

    Attributes:
        usual: the earlier ratios: their median, and how far a result may lie from it, which is the
            distance of their quartiles, or of the quartiles within an earlier run if that is more;
            None for the first result.
        slower: the newest ratio is below the usual one by more than that, and so are three quarters
            of its rounds.
    """

    newest: Result
    earlier: int
    usual: Spread | None
    slower: bool


def verdict(series: Sequence[Result]) -> Verdict:
    """Return what the last of these results says. They are of one series, oldest first."""
    *earlier, newest = series
    if not earlier:
        return Verdict(newest, 0, None, slower=False)
    among = spread([result.ratio for result in earlier])
    within = statistics.median(result.high - result.low for result in earlier)
    width = max(among.high - among.low, within)
    usual = Spread(among.median, among.median - width, among.median + width)
    return Verdict(
        newest, len(earlier), usual, slower=newest.ratio < usual.low and newest.high < usual.median
    )


def verdicts(results: Iterable[Result]) -> list[Verdict]:
    """Return one verdict per series, in the order of their first results."""
    series: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in results:
        series.setdefault(result.series, []).append(result)
    return [verdict(each) for each in series.values()]


def trend(results: Sequence[Result], *, shown: int = 8) -> list[str]:
    """Return each series as a line of its newest ratios, oldest first, with the verdict; by machine
    and work.
    """
    lines: list[str] = []
    last = None
    for found in verdicts(results):
        newest = found.newest
        if newest.series[:3] != last:
            last = newest.series[:3]
            lines += ["", f"{newest.machine}, torch {newest.torch}, work {newest.work}:"]
        ratios = [result.ratio for result in results if result.series == newest.series]
        path = " → ".join(f"{ratio:.3f}" for ratio in ratios[-shown:])
        lines.append(f"  {newest.row}: {path}   {said(found)}")
    return lines[1:]


def said(found: Verdict) -> str:
    """Return the verdict in words."""
    newest, usual = found.newest, found.usual
    what = (
        f"{newest.commit[:8] or 'unknown commit'}{' with changes' if newest.dirty else ''}, "
        f"{newest.date[:10]}"
    )
    if usual is None:
        return f"first result ({what})"
    of = f"{found.earlier} earlier: {usual.median:.3f}, lowest expected {usual.low:.3f}"
    return (
        f"SLOWER: {newest.ratio:.3f} ({what}; {of})"
        if found.slower
        else f"as before ({what}; {of})"
    )
