"""Name a rank whose own part of a step takes longer than that of the others, which wait for it.

All ranks end a step together, so its duration names nobody. The straggler is the rank that waits
least for the others. torch's flight recorder knows when each rank has begun a collective (gloo) or
how long it was in it (NCCL). The ranks exchange that with a write of rows, twice a minute at most.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lightning.pytorch import Trainer

from armature.launcher import environment
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training import blocked

CHECK_SECONDS = 30.0  # between two comparisons
# comparisons in a row that must name the same rank: another program may take a core for a minute
CHECKS = 3
# of the others' time of a step; ranks on busy CPUs differ by up to 1.3 in one comparison
RATIO = 1.5
# of delay per step: rank 0 writes and prints, which shows in steps of some milliseconds
LEAST_SECONDS = 5e-3
QUIET_SECONDS = 300.0  # between two lines
LEAST_STEPS = 3
MOST_CALLS = 2**20  # of all ranks, in one exchange
MEETINGS = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "all_to_all",
    "alltoall",
)


@dataclass(frozen=True)
class Calls:
    """The collectives of one group that a rank has begun, in their order."""

    numbers: np.ndarray  # in the group
    steps: np.ndarray
    begun: np.ndarray  # s, on the machine's clock
    seconds: np.ndarray  # in the collective on the device; NaN: not known
    overlaps: bool  # the rank computes on, so one wait per step ends several of them


@dataclass(frozen=True)
class Record:
    """What a rank tells the others about the steps between two writes."""

    host: str
    node: int
    met: float  # s, on the machine's clock: when all ranks left one collective
    seconds: float  # that the calls span
    steps: float
    groups: dict[str, Calls] = field(default_factory=dict)


@dataclass(frozen=True)
class Straggler:
    rank: int
    host: str
    step_seconds: float
    others_seconds: float  # that a step would take without this rank

    @property
    def ratio(self) -> float:
        return self.step_seconds / self.others_seconds


class StragglerWatch:
    """Compare the ranks now and then, and name one that is slow in several comparisons in a row.

    Attributes:
        events: what was named, for summary.json.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._ends: list[float] = []  # of the steps since the last write
        self._next = time.monotonic() + CHECK_SECONDS
        self._next_line = 0.0
        self._suspect, self._times = -1, 0

    def restart(self) -> None:
        """Forget the steps so far: something else than training comes between them and the next
        ones.
        """
        self._ends.clear()

    def step_ended(self) -> None:
        self._ends.append(time.time())

    @property
    def is_due(self) -> bool:
        """Whether this rank wants a comparison. All ranks follow rank 0."""
        return time.monotonic() >= self._next and len(self._ends) >= LEAST_STEPS

    def compare(self, trainer: Trainer, *, step: int, waits: list[float]) -> str | None:
        """Compare the ranks' steps since the last write.

        Called by all ranks, right after a collective of theirs.

        Args:
            waits: share of the time that each rank waits for data.

        Returns:
            On rank 0, the line that names a rank, if one is due.
        """
        met = time.time()
        self._next = time.monotonic() + CHECK_SECONDS
        if trainer.world_size == 1:
            return None
        records = process_group.all_gather_object(
            own_record(self._ends, met=met, ranks=trainer.world_size)
        )
        if not trainer.is_global_zero:
            return None
        strategy = StrategyMixin.find(trainer)
        per_stage = trainer.world_size // (
            strategy.sizes.get("pipe", 1) if strategy is not None else 1
        )
        found = slowest(records, stage=lambda rank: rank // per_stage)
        if found is not None and waits[found.rank] > (1 - 1 / found.ratio) / 2:
            found = None  # it waits for data, which has a line of its own
        return self._judge(found, step=step, on_gpu=trainer.strategy.root_device.type == "cuda")

    def _judge(self, found: Straggler | None, *, step: int, on_gpu: bool) -> str | None:
        suspect = -1 if found is None else found.rank
        self._times = self._times + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if found is None or self._times < CHECKS or time.monotonic() < self._next_line:
            return None
        self._next_line = time.monotonic() + QUIET_SECONDS
        self.events.append(
            {
                "step": step,
                "rank": found.rank,
                "host": found.host,
                "ratio": round(found.ratio, 3),
                "seconds_per_step": found.step_seconds,
                "seconds_per_step_of_others": found.others_seconds,
            }
        )
        return line(found, on_gpu=on_gpu)


def line(found: Straggler, *, on_gpu: bool) -> str:
    """Return what is said about a straggler: its figures, and where to look."""
    took, others = found.step_seconds * 1e3, found.others_seconds * 1e3
    tool = (
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows a throttled GPU"
        if on_gpu
        else "a throttled CPU is another"
    )
    return (
        f"Rank {found.rank} on {found.host} takes {found.ratio:.1f} × the others' time of a step "
        f"({took:.3g} against "
        f"{others:.3g} ms), and they wait for it. Look there: top shows other programs on its "
        f"cores, {tool}. If its "
        "machine is idle and cool, its samples or what your code does on this rank alone may cost "
        "more; "
        "scripts/doctor.py compares the ranks at equal work."
    )


def own_record(ends: list[float], *, met: float, ranks: int) -> Record:
    """Return what this rank has to tell about its steps between the first and the last of
    `ends`.
    """
    host, node = socket.gethostname(), environment.node_rank()
    calls = [
        call
        for call in blocked.recorded()
        if any(word in call["profiling_name"] for word in MEETINGS)
    ]
    nccl = [call for call in calls if call["profiling_name"].startswith("nccl:")]
    if nccl:
        # gloo counts the same group's calls on its own, and the host's times say nothing about the
        # device
        calls = [call for call in nccl if call.get("duration_ms") is not None]
    calls = calls[-max(64, MOST_CALLS // ranks) :]
    if len(ends) < LEAST_STEPS or not calls:
        return Record(host, node, met, 0.0, 0.0)
    since = max(ends[0], calls[0]["time_created_ns"] / 1e9)  # older calls may be recorded no more
    by_group: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for call in calls:
        if since <= (begun := call["time_created_ns"] / 1e9) <= ends[-1]:
            name, description = call["process_group"][:2]
            # of calls that overlap with compute, most of the time in one is no wait
            overlaps = (
                "all_reduce" in call["profiling_name"] or bool(nccl)
            ) and not description.endswith("tensor")
            took = call.get("duration_ms")
            seconds = np.nan if took is None else took / 1e3
            by_group[f"{name}{'~' * overlaps}"].append((call["collective_seq_id"], begun, seconds))
    groups = {}
    for name, rows in by_group.items():
        numbers, begun, seconds = np.array(rows).T
        groups[name] = Calls(
            numbers, np.searchsorted(ends, begun), begun, seconds, overlaps=name.endswith("~")
        )
    seconds = ends[-1] - since
    return Record(
        host, node, met, seconds, seconds / (ends[-1] - ends[0]) * (len(ends) - 1), groups
    )


def slowest(records: list[Record], *, stage: Callable[[int], int]) -> Straggler | None:
    """Return the rank that the others of its stage wait for, if that takes long; None without one.

    Args:
        records: of all ranks, in their order.
        stage: of a rank. Stages of a pipeline have unequal work, so only ranks of one stage are
            compared.
    """
    waits = seconds_waited(records, stage=stage)
    found: list[Straggler] = []
    for each in {stage(rank) for rank in range(len(records))}:
        ranks = [rank for rank in range(len(records)) if stage(rank) == each]
        first = min(ranks, key=waits.__getitem__)
        record = records[first]
        if len(ranks) < 2 or not record.steps:
            continue
        delay = statistics.median(waits[rank] for rank in ranks if rank != first) - waits[first]
        step = record.seconds / record.steps
        others = max(record.seconds - delay, record.seconds / 100) / record.steps
        if delay / record.steps >= LEAST_SECONDS and step / others >= RATIO:
            found.append(Straggler(first, record.host, step, others))
    return max(found, key=lambda each: each.ratio, default=None)


def seconds_waited(records: list[Record], *, stage: Callable[[int], int]) -> list[float]:
    """Return how long each rank has waited for ranks of its own stage."""
    waited, offsets = [0.0] * len(records), _clock_offsets(records)
    for group in {name for record in records for name in record.groups}:
        ranks = [rank for rank, record in enumerate(records) if group in record.groups]
        if len(ranks) < 2 or len({stage(rank) for rank in ranks}) > 1:
            continue
        calls = [records[rank].groups[group] for rank in ranks]
        common = calls[0].numbers
        for each in calls[1:]:
            common = np.intersect1d(common, each.numbers)
        places = [np.searchsorted(each.numbers, common) for each in calls]
        seconds = np.stack([each.seconds[place] for each, place in zip(calls, places, strict=True)])
        begun = np.stack([
            each.begun[place] - offsets[records[rank].node]
            for each, place, rank in zip(calls, places, ranks, strict=True)
        ])  # fmt: skip
        known = np.isfinite(seconds).all(axis=0)
        measured = seconds - np.where(known, seconds, 0.0).min(axis=0, initial=np.inf)
        waits = np.where(known, measured, begun.max(axis=0, initial=-np.inf) - begun)
        for rank, each, place, wait in zip(ranks, calls, places, waits, strict=True):
            if not each.overlaps:
                waited[rank] += float(wait.sum())
            else:
                longest: dict[int, float] = defaultdict(float)
                for step, value in zip(each.steps[place], wait, strict=True):
                    longest[step] = max(longest[step], value)
                waited[rank] += sum(longest.values())
    return waited


def _clock_offsets(records: list[Record]) -> dict[int, float]:
    """Return how far the clock of each machine is ahead, since all ranks left one collective at
    about the same time.
    """
    of_all = statistics.median(record.met for record in records)
    by_node: dict[int, list[float]] = defaultdict(list)
    for record in records:
        by_node[record.node].append(record.met)
    if len(by_node) == 1:
        return dict.fromkeys(by_node, 0.0)
    return {node: statistics.median(times) - of_all for node, times in by_node.items()}
