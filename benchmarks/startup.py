"""Time from the command to the end of the first optimizer step, interleaved with unavoidable
imports.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.contender import Contender, Running, environment
from benchmarks.rounds import Record

IMPORTS = "python -c 'import torch, lightning'"
INSIDE = "bare loop, after its imports"


def measure(
    contenders: list[Contender], folder: Path, *, rounds: int, say: Callable[[str], None]
) -> list[Record]:
    """Return records of the two imports alone, of each contender from its command on, and of the
    bare loop's own part.

    The first round is not counted: it writes compiled Python files, and fills the page cache.

    Raises:
        ContenderFailed: where one does not come to its first step.
    """
    records = [Record(name, 1) for name in (IMPORTS, *(c.name for c in contenders), INSIDE)]
    for number in range(rounds + 1):
        seconds = [_imports()]
        inside = 0.0
        for contender in contenders:
            running = Running(contender, folder)
            try:
                seconds.append(running.wait_for_first_step())
                inside = inside or running.seconds_at_first_step
            finally:
                running.stop()
        seconds.append(inside)
        if number:
            for record, value in zip(records, seconds, strict=True):
                record.seconds.append(value)
            took = (f"{r.name} {r.seconds[-1]:.2f}" for r in records)
            say(f"round {number} of {rounds}, s: {', '.join(took)}")
    return records


def _imports() -> float:
    command = [sys.executable, "-c", "import torch, lightning"]
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment(), stderr=subprocess.PIPE)
    return time.perf_counter() - start


def over_the_limit(records: list[Record], name: str) -> list[float]:
    """Return per round the contender's time relative to the imports plus the bare loop's first
    step.
    """
    by_name = {record.name: record.seconds for record in records}
    rows = zip(by_name[name], by_name[IMPORTS], by_name[INSIDE], strict=True)
    return [ours / (imports + inside) for ours, imports, inside in rows]
