"""The comparison with other programs: one table that needs no knowledge."""

import math
import platform
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from armature import hardware
from armature.launcher import heap
from benchmarks.contender import Contender
from benchmarks.job import Workload, bare, compose, ours, rival
from benchmarks.rounds import Record, Rounds, ratios, spread

SECONDS = 260  # from the command to the last round, if --rounds does not say how many
# with Muon, raw ddp would do the work of each rank twice, and ours would not
OPTIMIZER = "optimizer=adamw_bench"
RIVALS = ("accelerate", "transformers", "lightning")


@dataclass(frozen=True)
class Row:
    """One line of the table: ours and the program that it is compared with, on the same number of
    processes.
    """

    shown: str
    ranks: int
    ours: Record
    other: Record

    @property
    def problem(self) -> str:
        """Return why there is nothing to compare, or an empty string."""
        return self.other.note or (f"ours {self.ours.note}" if self.ours.note else "")


def run(args: Namespace, folder: Path, *, say: Callable[[str], None]) -> int:
    """Measure, print the table, and return 1 if a program failed."""
    folder.mkdir(parents=True, exist_ok=True)
    end = math.inf if args.rounds else time.monotonic() + SECONDS
    workload = replace(compose([OPTIMIZER, *args.overrides]), ranks=1)
    rows = measure(
        workload,
        folder,
        rounds=args.rounds,
        block_seconds=args.seconds,
        end=end,
        only=args.only,
        say=say,
    )
    print("\n".join(table(rows, workload)))
    return 1 if any(row.problem.startswith(("failed", "ours failed")) for row in rows) else 0


def measure(
    workload: Workload,
    folder: Path,
    *,
    rounds: int | None,
    block_seconds: float,
    end: float,
    only: list[str] | None,
    say: Callable[[str], None],
) -> list[Row]:
    """Return the rows; only those that contain one of the words `only`.

    All programs take turns in the same rounds.
    """
    compared = pairs(workload, folder)
    if only:
        compared = [pair for pair in compared if any(word in pair[1].name for word in only)]
    contenders = list(
        {contender.name: contender for pair in compared for contender in pair}.values()
    )
    turns = Rounds(
        contenders,
        folder,
        block_seconds=block_seconds,
        multiple=workload.job.log_every_n_steps,
        say=say,
    )
    records = turns.together(rounds or 1000, end=end)
    by_name = {record.name: record for record in records}
    return [
        Row(other.name, mine.ranks, by_name[mine.name], by_name[other.name])
        for mine, other in compared
    ]


def pairs(workload: Workload, folder: Path) -> list[tuple[Contender, Contender]]:
    """Return ours and the other program of each row: in one process, then on two or more."""
    job_file = workload.job.save(folder / "job.json")
    one = ours(workload, folder)
    found = [(one, bare(job_file, name="a bare PyTorch loop"))]
    found += [(one, rival(name, job_file, folder)) for name in RIVALS]
    ranks = hardware.gpu_count() if workload.accelerator == "gpu" else 2
    if ranks < 2 or workload.job.global_batch_size % ranks:
        return found
    for port, name in enumerate(("ddp", "fsdp"), start=29627):
        mine = ours(workload, folder, f"strategy={name}", name=f"ours, {name}", ranks=ranks)
        found.append(
            (mine, bare(job_file, name, name=f"PyTorch's own {name}", ranks=ranks, port=port))
        )
    return found


def table(rows: list[Row], workload: Workload) -> list[str]:
    """Return the comparison as a table with all that is needed to read it."""
    job = workload.job
    rounds = max((len(row.other.seconds) for row in rows), default=0)
    same = (
        " All keep the memory that they free, as Armature does by itself (the heap)."
        if heap.rank_variables(job.device)
        else ""
    )
    lines = [
        f"Armature's training speed compared with other programs: {machine(workload)}, torch "
        f"{version('torch')}, "
        f"Python {platform.python_version()}.",
        f"All train the same model ({workload.model_name}) with the same optimizer (AdamW), "
        "precision "
        f"({job.precision}) and {job.global_batch_size} × {job.context} tokens per step, and take "
        f"turns of seconds.{same}",
        "A speed of 1.05 means: Armature makes 105 steps while the other program makes 100. It is "
        "the median of "
        f"{rounds} turn{'s' * (rounds != 1)}; half of the turns lie in the range beside it.",
        "",
        "| compared with | processes | Armature's speed | range | in words | memory: Armature | "
        "the other |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for row in rows:
        if row.problem:
            lines.append(f"| {row.shown} | {row.ranks} | – | | {short(row.problem)} | | |")
            continue
        found = spread(ratios(row.ours, row.other))
        lines.append(
            f"| {row.shown} | {row.ranks} | {found.median:.2f} | {found.low:.2f}–{found.high:.2f} "
            "| "
            f"{in_words(found.low, found.high)} | {memory(row.ours)} | {memory(row.other)} |"
        )
    return [
        *lines,
        "",
        "Memory is the peak of one process. What is measured, and how: docs/measured.md",
    ]


def machine(workload: Workload) -> str:
    if workload.accelerator != "gpu":
        return hardware.cpu_name()
    return f"{hardware.gpu_count()} × {hardware.gpu_name()}"


def in_words(low: float, high: float) -> str:
    return "faster" if low > 1.0 else "slower" if high < 1.0 else "no clear difference"


def memory(record: Record) -> str:
    return f"{record.peak / 2**20:,.0f} MiB"


def short(problem: str) -> str:
    return problem.split(" (/")[0].replace("|", "/")[:80]
