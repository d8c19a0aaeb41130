"""The ranks of an examination: they meet, enter each check under a deadline, and one of them
reports.

Every rank notes in a store which check it is in. If a deadline passes, a thread of the first rank
whose time is over
reads from the store who came and who did not, reports all findings so far, and ends the process: no
collective that
never completes keeps the doctor waiting.
"""

import json
import os
import shutil
import socket
import sys
import threading
import time
import traceback
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
COLLECT_SECONDS = 2.0  # that the reporting rank waits for the others' stacks after a deadline
FRAMES = 3  # of a stack, the innermost ones of code that is not torch's


class Unreachable(Exception):
    """This rank met no other. `findings` say why."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(findings[0].what)
        self.findings = findings


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
        store: in which the ranks leave notes; None for one process.
        group_store: for the process group.
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
    _finished: bool = False

    def add(self, *found: Finding) -> None:
        self.findings += found

    def name(self, rank: int | None = None) -> str:
        """Return `rank 3 on node7`."""
        rank = self.rank if rank is None else rank
        host = self.hosts[rank] if rank < len(self.hosts) else None
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    @contextmanager
    def limit(self, check: str, *, seconds: float, group: str = "communication") -> Iterator[None]:
        """End the examination with a report if the block takes longer.

        All ranks enter the same checks in order.
        """
        self._step += 1
        self._note("at", f"{self._step} {check}")
        self._publish()
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
            if self.store is not None and any(
                self._read("failed", other) for other in range(self.ranks)
            ):  # another rank has failed and reported
                self._end(2)
            if time.monotonic() >= end:
                self._expired(check, step, seconds, group, main)

    def fail(self, found: Finding) -> None:
        """Report what ends the examination on this rank alone, and end the process."""
        self.add(found)
        if self._is_first():
            self._report()
        else:
            time.sleep(2 * COLLECT_SECONDS)  # a thread of this process may be about to report
        self._end(finding.EXIT_CODES[found.level])

    def finish(self, *, seconds: float = 20.0) -> None:
        """Collect all ranks' findings; rank 0 reports them."""
        self._finished = True
        self._publish()
        self._note("finished", "yes")
        if self.rank == 0:
            self._wait_for("finished", range(self.ranks), seconds=seconds)
            if self._is_first():
                self._report()
            self._note("reported", "yes")
            self._wait_for("left", range(1, self.ranks), seconds=COLLECT_SECONDS)
        elif self.store is not None:
            # the store lives in rank 0's process, and an agent ends all ranks with the first
            self._wait_for("reported", [0], seconds=seconds)
            self._note("left", "yes")

    # ------------------------------------------------------------ notes
    def _note(self, kind: str, text: str) -> None:
        if self.store is not None:
            with suppress(dist.DistError, RuntimeError):
                self.store.set(f"{kind}/{self.rank}", text)

    def _wait_for(self, kind: str, ranks: Sequence[int], *, seconds: float) -> None:
        """Wait until these ranks have left a note.

        Not with `store.wait`, whose failure prints a stack of C++.
        """
        end = time.monotonic() + seconds
        while self.store is not None and time.monotonic() < end:
            if all(self._read(kind, rank) for rank in ranks):
                return
            time.sleep(0.05)

    def _read(self, kind: str, rank: int) -> str | None:
        with suppress(dist.DistError, RuntimeError):
            if self.store.check([f"{kind}/{rank}"]):
                return self.store.get(f"{kind}/{rank}").decode()
        return None

    def _publish(self) -> None:
        self._note("findings", json.dumps(finding.to_records(self.findings)))

    def _everyones(self) -> list[Finding]:
        found = []
        for rank in range(self.ranks):
            if rank == self.rank:
                found += self.findings
            elif self.store is not None and (text := self._read("findings", rank)):
                found += finding.from_records(json.loads(text))
        return found

    # ------------------------------------------------------------ a deadline
    def _expired(self, check: str, step: int, seconds: float, group: str, main: int) -> None:
        own = _stack_of(main)
        self._note("stack", own)
        if self._is_first():
            # until the others, whose deadline is the same, have written their stacks
            time.sleep(COLLECT_SECONDS)
            self.add(_too_slow(check, seconds, own, group=group) if self.store is None else
                     self._describe(check, step, seconds, group))  # fmt: skip
            self._report()
        time.sleep(COLLECT_SECONDS)
        self._end(2)

    def _describe(self, check: str, step: int, seconds: float, group: str) -> Finding:
        """Return who never came to a check, or where each rank is that came."""
        waiting, missing, gone = [], [], []
        for rank in range(self.ranks):
            at = self._read("at", rank) if rank != self.rank else f"{step} {check}"
            number, _, name = (at or "0 the start").partition(" ")
            if int(number) < step:
                missing.append(f"{self.name(rank)} (last seen in: {name})")
            elif int(number) > step:
                gone.append(self.name(rank))
            else:
                waiting.append(rank)
        stacks = {rank: self._read("stack", rank) for rank in waiting}
        if missing:
            what = (
                f"{check}: {listed(missing)} never came within {seconds:.0f} s; "
                f"{listed_ranks(waiting)} waited there."
            )
            remedy = (
                "Look at that rank's machine: does the process live (ps, nvidia-smi), does it wait "
                "for a disk or for "
                "data? A rank that takes another way through the code than the others makes them "
                "wait for ever."
            )
        elif gone:
            what = (
                f"{check}: {listed(gone)} left it, but {listed_ranks(waiting)} never did "
                f"within {seconds:.0f} s."
            )
            remedy = (
                "The ranks did not make the same collective calls. Look for code that runs "
                "on some ranks only."
            )
        else:
            what = f"{check}: all ranks came, but it did not end within {seconds:.0f} s."
            remedy = _REMEDIES.get(group, _REMEDIES["communication"])
        places: dict[str, list[int]] = {}
        for at_rank, text in stacks.items():
            places.setdefault(text or "unknown", []).append(at_rank)
        if group != "communication" or len(places) > 1:
            what += " " + "; ".join(
                f"{listed_ranks(ranks)}: {text}" for text, ranks in list(places.items())[:3]
            )
        return finding.failure(group, what, remedy=remedy)

    def _is_first(self) -> bool:
        """Return whether this rank is the first that wants to report, and therefore does."""
        if self.store is not None:
            with suppress(dist.DistError, RuntimeError):
                return self.store.add("reporters", 1) == 1
        return True

    def _report(self) -> None:
        self.report(self._everyones())
        if not self._finished:
            self._note("failed", "yes")  # the others end then

    def _end(self, code: int) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_REMEDIES = {
    "communication": "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the network between the "
    "nodes, check firewalls, "
    "and try NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1.",
    "gradients": "A rank may have skipped a collective. Look at code that runs on some ranks only "
    "(`if rank == 0`), at "
    "loaders of unequal length, and at parameters that get no gradient on some ranks.",
    "data": "Look at the loader: a worker may wait for a disk, a lock or the network. Type "
    "data.num_workers=0 to see.",
}


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
    rank, ranks = environment.rank(), environment.world_size()
    if ranks == 1:
        return Session(
            None, None, 0, 1, deadlines, report, findings=own, hosts=[socket.gethostname()]
        )
    started = time.monotonic()
    group_store, store = _stores(rank, ranks, seconds=deadlines.meeting)
    session = Session(store, group_store, rank, ranks, deadlines, report, findings=own)
    place = {"host": socket.gethostname(), "machine": _machine(), "node": environment.node_rank()}
    session._note(
        "here", json.dumps({**place, "local_rank": environment.local_rank(), "alike": dict(alike)})
    )
    end = started + deadlines.meeting
    present: dict[int, dict[str, Any]] = {}
    while len(present) < ranks and time.monotonic() < end:
        for other in range(ranks):
            if other not in present and (text := session._read("here", other)):
                present[other] = json.loads(text)
        time.sleep(0.02 if len(present) < ranks else 0)
    session.hosts = host_names(present, ranks=ranks)
    if missing := [other for other in range(ranks) if other not in present]:
        if session._is_first():
            session.add(_never_started(missing, ranks, session.hosts, seconds=deadlines.meeting))
            session._report()
        time.sleep(COLLECT_SECONDS)
        session._end(2)
    places = [(session.hosts[other], present[other]["local_rank"]) for other in range(ranks)]
    if rank == 0:
        session.add(*_places(places, ranks, on_gpus=on_gpus))
        session.add(
            *differences([present[other]["alike"] for other in range(ranks)], name=session.name)
        )
    return session


def _machine() -> str:
    """Return an identity of this machine since its start, or of this container."""
    parts = [socket.gethostname()]
    for name in ("pid", "net"):
        with suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)


def host_names(present: Mapping[int, Mapping[str, Any]], *, ranks: int) -> list[str]:
    """Return each rank's host, empty if it is not present; machines of the same name get their
    node's number.
    """
    machines: dict[str, set[str]] = {}
    for each in present.values():
        machines.setdefault(each["host"], set()).add(each["machine"])
    names = {
        rank: each["host"]
        if len(machines[each["host"]]) == 1
        else f"{each['host']} (node {each['node']})"
        for rank, each in present.items()
    }
    return [names.get(rank, "") for rank in range(ranks)]


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
            shown = ", ".join(f"{value} on {name(rank)}" for value, rank in list(first.items())[:4])
            remedy = (
                "Start the same command in the same environment, with the same files, on "
                "every machine."
            )
            yield finding.failure(
                "environment", f"{what} differs between the ranks: {shown}.", remedy=remedy
            )


def _never_started(missing: list[int], ranks: int, hosts: list[str], *, seconds: float) -> Finding:
    known = sorted({host for host in hosts if host})
    return finding.failure(
        launch.GROUP,
        f"{listed_ranks(missing)} of {ranks} never started within {seconds:.0f} s; the "
        f"others are on {', '.join(known)}.",
        remedy="Look at the launcher's output on that rank's machine: the command must run on "
        "every node, with the "
        "same MASTER_ADDR, MASTER_PORT and number of nodes, and find the same Python environment.",
    )


def _places(places: list[tuple[str, int]], ranks: int, *, on_gpus: bool) -> Iterator[Finding]:
    hosts = list(dict.fromkeys(host for host, _ in places))
    seen: dict[tuple[str, int], int] = {}
    for rank, place in enumerate(places):
        if place in seen:
            what = (
                f"Ranks {seen[place]} and {rank} both have LOCAL_RANK={place[1]} on "
                f"{place[0]}: they share a device."
            )
            found = finding.failure if on_gpus else finding.warning
            yield found(
                launch.GROUP,
                what,
                remedy="Start one rank per device; look at the launcher's script.",
            )
        seen[place] = rank
    counts = {host: sum(h == host for h, _ in places) for host in hosts}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{count} on {host}" for host, count in counts.items())
        what = f"The machines run unequal numbers of ranks: {numbers}."
        yield finding.failure(launch.GROUP, what, remedy="Start the same number on each.")
    machines = f"{len(hosts)} machine{'s' * (len(hosts) > 1)}"
    yield finding.ok(
        launch.GROUP, f"All {ranks} ranks started and found each other, on {machines}."
    )


def _stores(rank: int, ranks: int, *, seconds: float) -> tuple[Any, Any]:
    """Return a store for the process group, and another connection to it for notes from any
    thread.
    """
    stores: Any = dist
    if (file := environment.store_file()) is not None:
        path = Path(file)
        return (stores.FileStore(str(path), ranks), stores.FileStore(f"{path}.notes", -1))
    address, port = environment.main_address(), environment.main_port()
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if listens and (problems := launch.port_findings(address, port)):
        raise Unreachable(problems)
    if not launch.resolved(address):
        raise Unreachable([launch.unresolved(address)])
    timeout = timedelta(seconds=seconds)
    try:
        first = stores.TCPStore(address, port, ranks, listens, timeout, wait_for_workers=False)
        second = stores.TCPStore(address, port, ranks, False, timeout, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        found = launch.answer_findings(address, port, rank=rank)
        raise Unreachable(found) from error
    return stores.PrefixStore("doctor", first), stores.PrefixStore("doctor-notes", second)


def _too_slow(check: str, seconds: float, stack: str, *, group: str) -> Finding:
    what = f"{check} did not end within {seconds:.0f} s. It is in: {stack}"
    return finding.failure(
        group, what, remedy=_REMEDIES.get(group, "Type --step-seconds=… if it is only slow.")
    )


def _stack_of(thread: int) -> str:
    """Return the innermost calls of a thread as one line, preferring code outside of torch."""
    frame = sys._current_frames().get(thread)
    shown = own_frames(traceback.extract_stack(frame) if frame is not None else [])
    return " < ".join(
        f"{Path(each.filename).name}:{each.lineno} {each.name}"
        for each in reversed(shown[-FRAMES:])
    )
