"""The report about a hang: where each rank was, and in which collective it waited. Torch-free."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from armature.errors import is_users

FLIGHT = "flight.{rank}"  # the collectives of a rank in flight, in the folder of heartbeats
REPORT = "hang.txt"  # in the folder of logs
FRAMES = 12
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)


class Progress(NamedTuple):
    """What a rank notes in its file in the folder of heartbeats."""

    place: str  # such as "train after step 7"
    seconds: float | None  # that it has for what it does; None: any time
    deadline: float | None  # on the machine's monotonic clock
    log_size: int  # bytes of its log when it started


def report(folder: Path, logs: Path, *, ranks: Mapping[int, Progress]) -> tuple[list[str], str]:
    """Return a line per rank, and the text of hang.txt: the same lines with the stacks.

    Args:
        folder: of heartbeats.
        ranks: those that were alive, and their last progress.
    """
    lines, text = [], [time.strftime("%Y-%m-%d %H:%M:%S")]
    for rank, progress in sorted(ranks.items()):
        frames = _stack(logs / f"rank_{rank:04d}.log", since=progress.log_size)
        # what waits is Python's or a library's code; what called it is the user's
        place = max(
            frames, key=lambda each: (is_users(each[0]), "site-packages" in each[0]), default=()
        )
        at = f" at {place[0]}:{place[1]} {place[2]}" if place else " (it has left no stack)"
        line = f"rank {rank}: {progress.place},{at}"
        with suppress(OSError, ValueError):
            in_flight = json.loads((folder / FLIGHT.format(rank=rank)).read_text())
            line += f"; waits in {in_flight[0]}" if in_flight else "; waits in no collective"
        lines.append(line)
        text += ["", line, *(f"    {file}:{at} {name}" for file, at, name in frames[:FRAMES])]
    return lines, "\n".join(text) + "\n"


def _stack(log: Path, *, since: int) -> list[tuple[str, str, str]]:
    """Return file, line and function of the main thread's frames, innermost first.

    faulthandler writes the main thread last.
    """
    try:
        with log.open("rb") as file:
            file.seek(since)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    threads = [*_THREAD.finditer(text)]
    if not threads:
        return []
    dump, _, _ = text[threads[-1].end() + 1 :].partition("\n\n")
    return _FRAME.findall(dump)


def named(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
