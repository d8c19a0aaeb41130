"""Whether all ranks' communication would meet on GPUs, from what each rank's own run has issued.

NCCL works through the operations of a communicator in the order in which a rank issues them, a send
ends when its receive has begun, and communicators must be used in one order on all ranks. gloo
buffers messages instead, so what hangs on GPUs can pass every test on CPUs. Here every rank of a
layout runs alone, its operations are recorded, and then all records are played together by NCCL's
rules.
"""

# pyright: reportPrivateImportUsage=false
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from armature.errors import ConfigError
from armature.planning.devices import Device
from armature.planning.simulation import processes
from armature.planning.simulation.hooks import wrap
from armature.planning.simulation.meter import Meter, where

MAX_RANKS = 64


@dataclass(frozen=True)
class Operation:
    """One collective, send or receive of one rank. Ranks are those of the whole run."""

    kind: str  # all_reduce, send, …
    group: tuple[int, ...]
    peer: int = -1  # of a send or receive; the source of a broadcast; -1: none
    bytes: int = 0  # of the largest tensor, as the meter counts it
    # elements that an all-to-all sends to each rank of the group, then receives from each
    splits: tuple[int, ...] = ()

    @property
    def is_to_one(self) -> bool:
        return self.kind in ("send", "recv")

    def __str__(self) -> str:
        if self.is_to_one:
            return (
                f"{self.kind} of {self.bytes} bytes {'to' if self.kind == 'send' else 'from'} "
                f"rank {self.peer}"
            )
        source = f" from rank {self.peer}" if self.peer >= 0 else ""
        return (
            f"{self.kind} of {self.bytes} bytes{source} among ranks "
            f"{', '.join(map(str, self.group))}"
        )


@dataclass
class Issued:
    """What a rank issues at once: one operation, or several batched sends and receives."""

    operations: list[Operation]
    line: str  # the innermost line of code outside of libraries


Record = list[Issued]


class Recorder:
    """Notes all communication that the meter counts, from now on.

    Attributes:
        record: what was issued, in order.
    """

    def __init__(self, meter: Meter) -> None:
        self.record: Record = []
        self._batch: list[Operation] | None = None
        meter.tell = self._note
        for owner in (dist, dist.distributed_c10d):
            wrap(owner, "batch_isend_irecv", self._batched)

    def _note(self, name: str, members: list[int], size: int, args: Any) -> None:
        if name == "monitored_barrier":
            return
        peer, splits, name = -1, (), {"isend": "send", "irecv": "recv"}.get(name, name)
        if name in ("send", "recv", "broadcast", "reduce", "gather", "scatter"):
            peer = members[next(arg for arg in args if isinstance(arg, int))]
        elif name in ("alltoall_base", "all_to_all_single"):
            lists = [arg for arg in args if isinstance(arg, list | tuple)]
            received, sent = [[*map(int, numbers)] for numbers in lists[:2]]
            splits, size = (*sent, *received), 0 if sent else size
        operation = Operation(name, tuple(members), peer, size, splits)
        if self._batch is not None:
            self._batch.append(operation)
        else:
            self.record.append(Issued([operation], where()))

    def _batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._batch = []
            try:
                return function(*args, **kwargs)
            finally:
                batch, self._batch = self._batch, None
                if batch:
                    self.record.append(Issued(batch, where()))

        return call


# ---------------------------------------------------------------- all ranks together
@dataclass
class _Queue:
    """What one rank has still to do."""

    issued: deque[Issued]
    open: list[Operation] = field(default_factory=list)  # of the first one, not yet met

    def __post_init__(self) -> None:
        self.open = [*self.issued[0].operations] if self.issued else []

    def close(self, operation: Operation) -> None:
        self.open.remove(operation)
        if not self.open:
            self.issued.popleft()
            self.open = [*self.issued[0].operations] if self.issued else []


def problems(records: Sequence[Record]) -> list[str]:
    """Return what hangs, if anything, when every rank does what its record says, in that order.

    Args:
        records: in order of ranks.
    """
    queues = [_Queue(deque(record)) for record in records]
    while any(_meet(rank, queues) for rank in range(len(queues))):
        pass
    if not any(queue.issued for queue in queues):
        return []
    lines = [f"{len(queues)} ranks do not meet. Each rank's first operation that never ends:"]
    for rank, queue in enumerate(queues):
        if not queue.issued:
            lines.append(f"  rank {rank} has ended")
            continue
        waiting = "; ".join(
            f"{operation}{_lacks(rank, operation, queues)}" for operation in queue.open
        )
        lines.append(f"  rank {rank} at {queue.issued[0].line}: {waiting}")
    return ["\n".join(lines)]


def _meet(rank: int, queues: list[_Queue]) -> bool:
    """Close the first open operation of a rank that all others of it have come to; return whether
    there is one.
    """
    for operation in queues[rank].open:
        if operation.is_to_one:
            counterpart = _counterpart(rank, operation)
            if counterpart in queues[operation.peer].open:
                queues[operation.peer].close(counterpart)
                queues[rank].close(operation)
                return True
            continue
        found = {other: _same(operation, queues[other].open) for other in operation.group}
        if all(found.values()) and _splits_agree(operation.group, found):  # pyright: ignore[reportArgumentType]
            for other, theirs in found.items():
                assert theirs is not None
                queues[other].close(theirs)
            return True
    return False


def _counterpart(rank: int, operation: Operation) -> Operation:
    kind = "recv" if operation.kind == "send" else "send"
    return Operation(kind, operation.group, rank, operation.bytes)


def _same(operation: Operation, others: Sequence[Operation]) -> Operation | None:
    key = (operation.kind, operation.group, operation.peer, operation.bytes)
    return next(
        (other for other in others if (other.kind, other.group, other.peer, other.bytes) == key),
        None,
    )


def _splits_agree(group: tuple[int, ...], found: dict[int, Operation]) -> bool:
    """Return whether what each rank of an all-to-all sends to another is what that one receives."""
    size = len(group)
    splits = [found[rank].splits for rank in group]
    return all(
        not splits[i] or not splits[j] or splits[i][j] == splits[j][size + i]
        for i in range(size)
        for j in range(size)
    )


def _lacks(rank: int, operation: Operation, queues: list[_Queue]) -> str:
    """Return which ranks an operation waits for."""
    if operation.is_to_one:
        there = _counterpart(rank, operation) in queues[operation.peer].open
        return "" if there else f", which rank {operation.peer} has not come to"
    absent = [other for other in operation.group if _same(operation, queues[other].open) is None]
    if not absent:
        return ", whose parts have other sizes on other ranks"
    return (
        f", which {', '.join(f'rank {other}' for other in absent)} "
        f"{'have' if len(absent) > 1 else 'has'} not come to"
    )


# ---------------------------------------------------------------- a run
def check(cfg: DictConfig, *, device: Device) -> list[str]:
    """Simulate all ranks of a composed configuration, in a validation and a training step; return
    what would hang.

    Raises:
        ConfigError: more than MAX_RANKS ranks, or a mistake in the configuration.
        SimulationFailed: a rank raised.
    """
    ranks = cfg.trainer.devices * cfg.trainer.num_nodes
    if ranks > MAX_RANKS:
        raise ConfigError(
            f"--order simulates each of the run's {ranks} ranks, and takes at most {MAX_RANKS}. "
            "Type smaller axes: 2 "
            "ranks along each axis (4 along pipe) issue the same operations in the same order."
        )
    requests = [
        processes.Request(cfg=cfg, rank=rank, device=device, record=True) for rank in range(ranks)
    ]
    found: list[Any] = processes.simulate_all(requests)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return problems([result.issued for result in found])
