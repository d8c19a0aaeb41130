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

from armature.doctor import finding, launch
from armature.doctor.finding import Finding, listed, listed_ranks
from armature.errors import own_frames
from armature.launcher import environment

POLL_SECONDS = 0.5
COLLECT_SECONDS = 2.0  # that the reporting rank waits for the others' notes
FRAMES = 3  # of a stack, the innermost ones of code that is not torch's
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


class Unreachable(Exception):
    """This rank met no other: `finding` says why."""

    def __init__(self, found: Finding) -> None:
        super().__init__(found.what)
        self.finding = found


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a check is given up: the ranks' start, a collective, building the model,
    a few steps.
    """

    meeting: float = 120.0
    collective: float = 30.0
    building: float = 600.0
    steps: float = 600.0


@dataclass
class Session:
    """This rank's part of an examination.

    Args:
        store: in which the ranks leave notes.
        group_store: for the process group; None for one process.
        report: called with all findings by the one rank that reports.
    """

    store: Any
    group_store: Any
    rank: int
    ranks: int
    deadlines: Deadlines
    report: Callable[[list[Finding]], None]
    findings: list[Finding] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    folder: Path | None = None  # of temporary files, removed also when the process is ended
    _step: int = 0

    def add(self, *found: Finding) -> None:
        self.findings += found
        self._publish()  # another rank may report

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
        self.note("at", f"{self._step} {check}")
        over, main = threading.Event(), threading.get_ident()
        arguments = (over, check, self._step, seconds, group, main)
        threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(
        self, over: threading.Event, check: str, step: int, seconds: float, group: str, main: int
    ) -> None:
        end = time.monotonic() + seconds
        while not over.wait(min(POLL_SECONDS, max(0.0, end - time.monotonic()))):
            if self.read("failed", 0):  # another rank has reported
                self._end(2)
            if time.monotonic() >= end:
                self.note("stack", _stack_of(main))
                time.sleep(COLLECT_SECONDS)  # until the others have noted theirs
                self.fail(self._describe(check, step, seconds, group))

    def fail(self, found: Finding) -> None:
        """Report what ends the examination, unless another rank does, and end the process."""
        self.add(found)
        if self._is_first():
            self.report(self._everyones())
            with suppress(dist.DistError, RuntimeError):
                self.store.set("failed/0", "yes")
        time.sleep(COLLECT_SECONDS)  # a thread of this process, or another rank, may be reporting
        self._end(finding.EXIT_CODES[found.level])

    def finish(self, *, seconds: float = 20.0) -> None:
        """Collect all ranks' findings; rank 0 reports them."""
        self.note("finished", "yes")
        if self.rank == 0:
            self.wait_for("finished", range(self.ranks), seconds=seconds)
            if self._is_first():
                self.report(self._everyones())
            self.note("reported", "yes")
            self.wait_for("left", range(1, self.ranks), seconds=COLLECT_SECONDS)
        else:
            # the store lives in rank 0's process, and an agent ends all ranks with the first
            self.wait_for("reported", [0], seconds=seconds)
            self.note("left", "yes")

    # ------------------------------------------------------------ notes
    def note(self, kind: str, text: str) -> None:
        with suppress(dist.DistError, RuntimeError):
            self.store.set(f"{kind}/{self.rank}", text)

    def read(self, kind: str, rank: int) -> str | None:
        with suppress(dist.DistError, RuntimeError):
            if self.store.check([f"{kind}/{rank}"]):
                return self.store.get(f"{kind}/{rank}").decode()
        return None

    def wait_for(self, kind: str, ranks: Sequence[int], *, seconds: float) -> dict[int, str]:
        """Return the notes of these ranks, of those who leave one in time.

        Not with `store.wait`, whose failure prints a stack of C++.
        """
        end, found = time.monotonic() + seconds, {}
        while len(found) < len(ranks) and time.monotonic() < end:
            for rank in (rank for rank in ranks if rank not in found):
                if (text := self.read(kind, rank)) is not None:
                    found[rank] = text
            time.sleep(0.05 if len(found) < len(ranks) else 0)
        return found

    def _publish(self) -> None:
        self.note("findings", json.dumps(finding.to_records(self.findings)))

    def _everyones(self) -> list[Finding]:
        notes = (self.read("findings", rank) for rank in range(self.ranks))
        return [each for text in notes if text for each in finding.from_records(json.loads(text))]

    def _describe(self, check: str, step: int, seconds: float, group: str) -> Finding:
        """Return who never came to a check, or where each rank is that came."""
        notes = [self.read("at", rank) or "0 the start" for rank in range(self.ranks)]
        places = [
            (int(number), name) for number, _, name in (each.partition(" ") for each in notes)
        ]
        waiting = [rank for rank, (number, _) in enumerate(places) if number == step]
        gone = [self.name(rank) for rank, (number, _) in enumerate(places) if number > step]
        missing = [
            f"{self.name(rank)} (last seen in: {name})"
            for rank, (number, name) in enumerate(places)
            if number < step
        ]
        within = f"within {seconds:.0f} s"
        if missing:
            what = f"{listed(missing)} never came {within}; {listed_ranks(waiting)} waited there"
        elif gone:
            what = f"{listed(gone)} left it, but {listed_ranks(waiting)} never did {within}"
        else:
            what = f"all ranks came, but it did not end {within}"
        stacks: dict[str, list[int]] = {}
        for rank in waiting:
            stacks.setdefault(self.read("stack", rank) or "unknown", []).append(rank)
        shown = (f"{listed_ranks(ranks)}: {text}" for text, ranks in [*stacks.items()][:3])
        what = f"{check}: {what}. {'; '.join(shown)}"
        return finding.failure(group, what, remedy=REMEDIES[group])

    def _is_first(self) -> bool:
        """Return whether this rank is the first that wants to report, and therefore does."""
        with suppress(dist.DistError, RuntimeError):
            return self.store.add("reporters", 1) == 1
        return True

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
    """Join the other ranks.

    Raise Unreachable if this rank cannot; end with a report if others do not come.

    Args:
        own: what this rank has found before.
        alike: what must be equal on all ranks, such as torch's version, by its name.
        on_gpus: two ranks in one place of a machine fail then; on CPUs they only share its cores.
    """
    rank, ranks, started = environment.rank(), environment.world_size(), time.monotonic()
    group_store, store = _stores(rank, ranks, seconds=deadlines.meeting)
    session = Session(store, group_store, rank, ranks, deadlines, report, findings=own)
    place = (socket.gethostname(), environment.node_rank(), environment.local_rank())
    session.add()
    session.note("here", json.dumps({"place": place, "alike": dict(alike)}))
    left = deadlines.meeting - (time.monotonic() - started)
    notes = session.wait_for("here", range(ranks), seconds=left)
    present = {other: json.loads(text) for other, text in notes.items()}
    session.hosts = [
        present[other]["place"][0] if other in present else "?" for other in range(ranks)
    ]
    if missing := [other for other in range(ranks) if other not in present]:
        hosts = listed(sorted({*session.hosts} - {"?"}))
        what = f"{listed_ranks(missing)} of {ranks} never started within {deadlines.meeting:.0f} s"
        remedy = (
            "Look at the launcher's output on that rank's machine: the command must run on every "
            "node, with the same MASTER_ADDR, MASTER_PORT and number of nodes, and find the same "
            "Python environment."
        )
        what = f"{what}; the others are on {hosts}."
        session.fail(finding.failure(launch.GROUP, what, remedy=remedy))
    if rank == 0 and ranks > 1:
        everyones = [present[other] for other in range(ranks)]
        session.add(*_places([tuple(each["place"]) for each in everyones], on_gpus=on_gpus))
        session.add(*differences([each["alike"] for each in everyones], name=session.name))
    return session


def differences(
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
    """Yield what is wrong with the machines, nodes and local ranks, in order of ranks."""
    for (host, _, local), count in Counter(places).items():
        if count > 1:
            what = f"{count} ranks have LOCAL_RANK={local} on {host}: they share a device."
            remedy = "Start one rank per device; look at the launcher's script."
            found = finding.failure if on_gpus else finding.warning
            yield found(launch.GROUP, what, remedy=remedy)
    counts = Counter(place[:2] for place in places)
    if len({*counts.values()}) > 1:
        numbers = listed([f"{count} on {host}" for (host, _), count in counts.items()])
        what = f"The machines run unequal numbers of ranks: {numbers}."
        yield finding.failure(launch.GROUP, what, remedy="Start the same number on each.")
    machines = f"{len(counts)} machine{'s' * (len(counts) > 1)}"
    what = f"All {len(places)} ranks started and found each other, on {machines}."
    yield finding.ok(launch.GROUP, what)


def _stores(rank: int, ranks: int, *, seconds: float) -> tuple[Any, Any]:
    """Return a store for the process group, and another connection to it for notes from any
    thread.
    """
    stores: Any = dist
    if ranks == 1:
        return None, stores.HashStore()
    if (file := environment.store_file()) is not None:
        return stores.FileStore(str(file), ranks), stores.FileStore(f"{file}.notes", -1)
    address, port = environment.main_address(), environment.main_port()
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if listens and (found := launch.why_unreachable(address, port, listens=True)) is not None:
        raise Unreachable(found)
    timeout = timedelta(seconds=seconds)
    try:
        if not listens and launch.resolved(address) is None:
            raise RuntimeError("torch would try for many minutes")
        first = stores.TCPStore(address, port, ranks, listens, timeout, wait_for_workers=False)
        second = stores.TCPStore(address, port, ranks, False, timeout, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        found = launch.why_unreachable(address, port, listens=False)
        assert found is not None
        raise Unreachable(found) from error
    return stores.PrefixStore("doctor", first), stores.PrefixStore("doctor-notes", second)


def _stack_of(thread: int) -> str:
    """Return the innermost calls of a thread as one line, preferring code outside of torch."""
    frame = sys._current_frames().get(thread)
    shown = own_frames(traceback.extract_stack(frame) if frame is not None else [])
    return " < ".join(
        f"{Path(each.filename).name}:{each.lineno} {each.name}"
        for each in reversed(shown[-FRAMES:])
    )
