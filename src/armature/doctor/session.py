"""The ranks of an examination: they meet, enter each check under a deadline, and one of them
reports.

Every rank notes in a store which check it is in and what it has found. If a deadline passes, a
thread of the first rank whose time is over reads who came and who did not, reports all findings so
far, and ends the process: no collective that never completes keeps the doctor waiting.
"""

import json
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from armature.doctor import finding
from armature.doctor.finding import Finding, listed, listed_ranks
from armature.errors import ConfigError, error_line, own_frames
from armature.launcher import environment
from armature.parallel import process_group

_Stores: Any = dist  # its stores are not in its stubs
POLL_SECONDS = 0.5
COLLECT_SECONDS = 2.0  # that the reporting rank waits for the others' notes
FRAMES = 3  # of a stack, the innermost ones of code that is not torch's
MEETING = 4  # the ranks may take so many times as long to start as a collective
REMEDIES = {  # by the group of a check that did not end
    "communication": "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the network between the "
    "nodes, check firewalls, and try NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1. Is "
    "a process that never came alive (ps, nvidia-smi), or does it wait for a disk or for data?",
    "gradients": "A rank may have skipped a collective. Look at code that runs on some ranks only "
    "(`if rank == 0`), at loaders of unequal length, and at parameters that get no gradient on "
    "some ranks.",
    "data": "Look at the loader: a worker may wait for a disk, a lock or the network. Type "
    "data.num_workers=0 to see, or --step-seconds=… if it is only slow.",
}
NO_MEETING = (
    "MASTER_ADDR must be the machine of rank 0, and MASTER_PORT free there; both are the same on "
    "all nodes, and no firewall is between them. NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose "
    "another network."
)


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a check is given up: a collective, and building the model or a few
    steps.
    """

    collective: float = 30.0
    steps: float = 600.0


@dataclass
class Session:
    """This rank's part of an examination.

    Args:
        report: called with all findings by the one rank that reports.
    """

    rank: int
    ranks: int
    deadlines: Deadlines
    report: Callable[[list[Finding]], None]
    store: Any  # in which the ranks leave notes
    group_store: Any = None  # for the process group; None for one process
    findings: list[Finding] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    folder: Path | None = None  # of temporary files, removed also when the process is ended
    _step: int = 0

    def add(self, *found: Finding) -> None:
        self.findings += found
        self.note("findings", self.findings)  # another rank may report

    def name(self, rank: int | None = None) -> str:
        """Return `rank 3 on node7`."""
        rank = self.rank if rank is None else rank
        return f"rank {rank} on {self.hosts[rank]}" if rank < len(self.hosts) else f"rank {rank}"

    @contextmanager
    def limit(self, check: str, *, seconds: float, group: str = "communication") -> Iterator[None]:
        """End the examination with a report if the block takes longer.

        All ranks enter the same checks in order.
        """
        self._step += 1
        self.note("at", (self._step, check))
        over, main = threading.Event(), threading.get_ident()
        arguments = (over, time.monotonic() + seconds, main, group)
        threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event, end: float, main: int, group: str) -> None:
        while not over.wait(min(POLL_SECONDS, max(0.0, end - time.monotonic()))):
            if self.read("failed", 0):  # another rank has reported
                self._end(2)
            if time.monotonic() >= end:
                self.note("stack", _stack_of(main))
                time.sleep(COLLECT_SECONDS)  # until the others have noted theirs
                what = self._describe()
                self.fail(finding.failure(group, what, remedy=REMEDIES[group]))

    def fail(self, found: Finding) -> None:
        """Report what ends the examination, unless another rank does, and end the process."""
        is_first = True
        with suppress(dist.DistError, RuntimeError):
            is_first = self.store.add("reporters", 1) == 1
        if is_first:
            self.add(found)
            self.report(self._everyones())
            self.note("failed", True, rank=0)
        time.sleep(COLLECT_SECONDS)  # a thread of this process, or another rank, may be reporting
        self._end(finding.EXIT_CODES[found.level])

    def finish(self) -> None:
        """Report all ranks' findings by rank 0."""
        with self.limit("the report", seconds=self.deadlines.collective):
            process_group.all_gather_object(None)  # all have noted theirs
            if self.rank == 0:
                self.report(self._everyones())
            # the store is in rank 0's process, and an agent ends all ranks with the first
            process_group.all_gather_object(None)

    # ------------------------------------------------------------ notes
    def note(self, kind: str, value: Any, *, rank: int | None = None) -> None:
        with suppress(dist.DistError, RuntimeError):
            self.store.set(f"{kind}/{self.rank if rank is None else rank}", json.dumps(value))

    def read(self, kind: str, rank: int) -> Any:
        """Return a rank's note, or None. It does not wait: torch would print a stack of C++."""
        with suppress(dist.DistError, RuntimeError):
            if self.store.check([f"{kind}/{rank}"]):
                return json.loads(self.store.get(f"{kind}/{rank}"))
        return None

    def _everyones(self) -> list[Finding]:
        notes = (self.read("findings", rank) for rank in range(self.ranks))
        return [Finding(*each) for found in notes for each in found or ()]

    def _describe(self) -> str:
        """Return who never came to this check, and where each rank is that came."""
        places = [self.read("at", rank) or (0, "the start") for rank in range(self.ranks)]
        step, check = places[self.rank]
        missing = [
            f"{self.name(rank)} (last seen in: {name})"
            for rank, (number, name) in enumerate(places)
            if number < step
        ]
        stacks: dict[str, list[int]] = {}
        for rank, (number, _) in enumerate(places):
            if number == step:
                stacks.setdefault(self.read("stack", rank) or "unknown", []).append(rank)
        waiting = [f"{listed_ranks(ranks)}: {text}" for text, ranks in stacks.items()]
        what = f"{listed(missing)} never came" if missing else "all ranks came"
        return f"{check}: {what}, and it did not end in time. Waiting there: {'; '.join(waiting)}"

    def _end(self, code: int) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def meet(
    *,
    deadlines: Deadlines,
    own: list[Finding],
    report: Callable[[list[Finding]], None],
    alike: Mapping[str, str],
    on_gpus: bool,
) -> Session:
    """Join the other ranks, or end with a report if this one cannot or others do not come.

    Args:
        own: what this rank has found before.
        alike: what must be equal on all ranks, such as torch's version, by its name.
        on_gpus: two ranks in one place of a machine fail then; on CPUs they only share its cores.
    """
    rank, ranks = environment.rank(), environment.world_size()
    seconds = MEETING * deadlines.collective
    end = time.monotonic() + seconds
    session = Session(rank, ranks, deadlines, report, _Stores.HashStore(), findings=own)
    try:
        store = _store(rank, ranks, seconds=seconds / 2)
    except (dist.DistError, RuntimeError, ConfigError) as error:
        why = error.problems[0] if isinstance(error, ConfigError) else error_line(error)
        where = f"rank {rank} on {socket.gethostname()}"
        session.fail(finding.failure("launch", why, remedy=NO_MEETING, where=where))
    else:
        session.store = _Stores.PrefixStore("doctor-notes", store.clone())  # for any thread
        session.group_store = _Stores.PrefixStore("doctor", store) if ranks > 1 else None
    session.add()
    place = (socket.gethostname(), environment.node_rank(), environment.local_rank())
    session.note("here", (place, dict(alike)))
    present: dict[int, Any] = {}
    while len(present) < ranks and time.monotonic() < end:
        notes = {other: session.read("here", other) for other in {*range(ranks)} - {*present}}
        present |= {other: note for other, note in notes.items() if note is not None}
        time.sleep(0.05)
    session.hosts = [present[other][0][0] if other in present else "?" for other in range(ranks)]
    if missing := [other for other in range(ranks) if other not in present]:
        hosts = listed(sorted({*session.hosts} - {"?"}))
        what = f"{listed_ranks(missing)} of {ranks} never started within {seconds:.0f} s"
        remedy = (
            "Look at the launcher's output on that rank's machine: the command must run on every "
            "node, with the same MASTER_ADDR, MASTER_PORT and number of nodes, and find the same "
            "Python environment."
        )
        what = f"{what}; the others are on {hosts}."
        session.fail(finding.failure("launch", what, remedy=remedy))
    if rank == 0 and ranks > 1:
        places, alike_of = zip(*(present[other] for other in range(ranks)), strict=True)
        session.add(*_places([tuple(each) for each in places], on_gpus=on_gpus))
        session.add(*_differences(alike_of, name=session.name))
    return session


def _differences(
    everyones: Sequence[Mapping[str, str]], *, name: Callable[[int], str]
) -> Iterator[Finding]:
    """Name what must be equal on all ranks and is not.

    Args:
        everyones: values by name, in order of ranks.
    """
    for what in everyones[0]:
        first: dict[str, int] = {}
        for rank, values in enumerate(everyones):
            first.setdefault(values[what], rank)
        if len(first) > 1:
            shown = listed([f"{value} on {name(rank)}" for value, rank in first.items()])
            remedy = "Start the same command in the same environment and files on every machine."
            what = f"{what} differs between the ranks: {shown}."
            yield finding.failure("environment", what, remedy=remedy)


def _places(places: list[tuple[str, int, int]], *, on_gpus: bool) -> Iterator[Finding]:
    """Yield which ranks share a device, by their machines, nodes and local ranks."""
    for (host, _, local), count in Counter(places).items():
        if count > 1:
            what = f"{count} ranks have LOCAL_RANK={local} on {host}: they share a device."
            remedy = "Start one rank per device; look at the launcher's script."
            found = finding.failure if on_gpus else finding.warning
            yield found("launch", what, remedy=remedy)
    hosts = listed(sorted({host for host, _, _ in places}))
    yield finding.ok("launch", f"All {len(places)} ranks started and found each other, on {hosts}.")


def _store(rank: int, ranks: int, *, seconds: float) -> Any:
    """Return the store of all ranks."""
    if ranks == 1:
        return _Stores.HashStore()
    if (file := environment.store_file()) is not None:
        return _Stores.FileStore(str(file), ranks)
    environment.wait_for_main_address(seconds=seconds / 4)
    address, port = environment.main_address(), environment.main_port()
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=seconds)
    return _Stores.TCPStore(address, port, ranks, listens, timeout, wait_for_workers=False)


def _stack_of(thread: int) -> str:
    """Return the innermost calls of a thread as one line, preferring code outside of torch."""
    frame = sys._current_frames().get(thread)
    shown = own_frames(traceback.extract_stack(frame) if frame is not None else [])
    return " < ".join(
        f"{Path(each.filename).name}:{each.lineno} {each.name}"
        for each in reversed(shown[-FRAMES:])
    )
