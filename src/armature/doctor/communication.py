"""Collectives and links between the ranks: do they end, are they right, and are they as fast as the
hardware?
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from armature.doctor.finding import Finding, failure, listed_ranks, ok, warning
from armature.doctor.session import Session
from armature.errors import ConfigError
from armature.launcher import environment
from armature.layout import Layout
from armature.parallel import mesh, process_group
from armature.planning import devices

GROUP = "communication"
POLL_SECONDS = 0.001
CLOCK_SECONDS = 1.0  # difference between two machines' clocks that is reported
SLOW = 0.6  # of the median: a rank or link below it is named
EXPECTED_SHARE = 0.4  # of the published rate of a link: what is measured below it is reported
MOST_ROUNDS = 16  # of pairs; with more ranks, only some pairs are measured
PING_PONGS = 10
COMPUTE_SECONDS = 0.05
_SLOW_KIND = {
    "within": "Type nvidia-smi topo -m: NVLink may be off, or GPUs of different sockets were "
    "chosen.",
    "between": "NCCL may use Ethernet, not InfiniBand: type export NCCL_DEBUG=INFO and look for "
    "NET/IB; set "
    "NCCL_IB_HCA and NCCL_SOCKET_IFNAME.",
}


@dataclass(frozen=True)
class Link:
    """What two ranks measured: seconds for a small message in one direction, and bytes per
    second.
    """

    first: int
    second: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class AxisGroup:
    """What the ranks of one group along an axis of the mesh measured.

    Args:
        seconds: of an all-reduce of one number.
        bandwidth: bytes per second that each rank sends, and receives, in a large all-reduce.
    """

    axis: str
    ranks: tuple[int, ...]
    seconds: float
    bandwidth: float


def check(cfg: DictConfig, session: Session) -> None:
    """Form the process group and measure it.

    Findings go to the session, those about all ranks to rank 0's.
    """
    if session.ranks == 1:
        return
    seconds = session.deadlines.collective
    with session.limit("forming the process group", seconds=session.deadlines.meeting):
        device = _init(cfg, session)
    with session.limit("barrier", seconds=seconds):
        _wait(dist.all_reduce(torch.ones(1, device=device), async_op=True))
    with session.limit("all-reduce", seconds=seconds):
        for elements in (1, 2**18):
            session.add(*reduced(device, elements, ranks=session.ranks, name=session.name))
    with session.limit("clocks", seconds=seconds):
        clocks = process_group.all_gather_object(_clock())
    with session.limit("speed of each rank", seconds=seconds):
        rates = process_group.all_gather_object(compute_rate(device))
    with session.limit("speed of each link", seconds=session.deadlines.collective * 2):
        links = [
            link
            for part in process_group.all_gather_object(measure_links(device, session))
            for link in part
        ]
    with session.limit("mesh axes", seconds=seconds * 2):
        everyones = process_group.all_gather_object(measure_axes(cfg, device))
    if session.rank == 0:
        session.add(*clock_findings(clocks, hosts=session.hosts))
        session.add(*rank_findings(rates, name=session.name))
        expected, groups = (
            expected_links(device),
            {(each.axis, each.ranks): each for own in everyones for each in own},
        )
        session.add(
            *link_findings(links, hosts=session.hosts, name=session.name, expected=expected)
        )
        session.add(*axis_findings([*groups.values()], hosts=session.hosts, expected=expected))


def _init(cfg: DictConfig, session: Session) -> torch.device:
    on_gpu = cfg.trainer.accelerator == "gpu"
    process_group.init(
        backend=OmegaConf.select(cfg, "strategy.backend") or "auto",
        accelerator=cfg.trainer.accelerator,
        timeout=timedelta(seconds=2 * session.deadlines.steps),  # our own deadline names the ranks
        store=session.group_store,
    )
    return torch.device("cuda", environment.local_rank()) if on_gpu else torch.device("cpu")


def _wait(work: Any) -> None:
    """Wait without blocking in the library, so that the deadline's thread can run."""
    while not work.is_completed():
        time.sleep(POLL_SECONDS)
    work.wait()


# ------------------------------------------------------------ right
def reduced(
    device: torch.device, elements: int, *, ranks: int, name: Callable[[], str]
) -> Iterator[Finding]:
    """Sum known numbers over the ranks.

    Every rank compares all of them with the sum that it computes itself.
    """
    index = torch.arange(elements, device=device, dtype=torch.float64) % 997
    numbers = index * (dist.get_rank() + 1)
    _wait(dist.all_reduce(numbers, async_op=True))
    wrong = int((numbers != index * (ranks * (ranks + 1) // 2)).sum())
    if wrong:
        what = f"{name()}: an all-reduce of {elements} numbers returned {wrong} wrong ones."
        remedy = (
            "Try NCCL_P2P_DISABLE=1 and NCCL_ALGO=Ring; if it is right then, report the "
            "machine: a link is broken."
        )
        yield failure(GROUP, what, remedy=remedy)
    elif dist.get_rank() == 0 and elements > 1:
        yield ok(
            GROUP, f"Collectives among {ranks} ranks end, and an all-reduce has the right value."
        )


# ------------------------------------------------------------ clocks
def _clock() -> float:
    dist.barrier()
    return time.time()


def clock_findings(times: Sequence[float], *, hosts: Sequence[str]) -> Iterator[Finding]:
    """Compare the clocks of the machines, read at the same moment."""
    middle = statistics.median_high(times)
    off = {host: seconds - middle for host, seconds in zip(hosts, times, strict=True)}
    wrong = {host: seconds for host, seconds in off.items() if abs(seconds) > CLOCK_SECONDS}
    if wrong and len(off) > 1:
        listed = ", ".join(f"{host} by {seconds:+.1f} s" for host, seconds in wrong.items())
        what = (
            f"Clocks differ: {listed}. Logs cannot be compared, and limits of time end ranks "
            "at different moments."
        )
        yield warning(
            "environment", what, remedy="Synchronize them: type chronyc makestep on that machine."
        )
    elif len(off) > 1:
        yield ok("environment", f"The clocks of {len(off)} machines agree.")


# ------------------------------------------------------------ ranks
def compute_rate(device: torch.device) -> float:
    """Return how many matrix products of a fixed size this rank computes per second: the best of
    several trials.
    """
    size = 4096 if device.type == "cuda" else 192
    a = torch.ones(size, size, device=device)
    best = 0.0
    for _ in range(5):
        count, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < COMPUTE_SECONDS:
            torch.mm(a, a)
            if device.type == "cuda":
                torch.cuda.synchronize()
            count += 1
        best = max(best, count / seconds)
    return best


def rank_findings(rates: Sequence[float], *, name: Callable[[int], str]) -> Iterator[Finding]:
    """Name the ranks that compute more slowly than the others."""
    typical = statistics.median_high(rates)
    slow = [(rank, rate) for rank, rate in enumerate(rates) if rate < SLOW * typical]
    for rank, rate in slow[:8]:
        what = (
            f"{name(rank)} computes at {rate / typical:.0%} of the others' speed; every step "
            "waits for it."
        )
        remedy = (
            "Look there for another program (nvidia-smi, top), a throttled device (nvidia-smi -q "
            "-d PERFORMANCE), "
            "or fewer cores; else leave the machine out (Slurm: --exclude)."
        )
        yield warning(GROUP, what, remedy=remedy)
    if not slow:
        yield ok(GROUP, f"The {len(rates)} ranks compute at the same speed, within {1 - SLOW:.0%}.")


# ------------------------------------------------------------ links
def pairs(ranks: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, in which every rank meets every other, or MOST_ROUNDS
    others.
    """
    players = [*range(ranks), *([-1] * (ranks % 2))]
    rounds = []
    for _ in range(min(len(players) - 1, MOST_ROUNDS)):
        half = len(players) // 2
        matches = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in matches if -1 not in (a, b)])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def measure_links(device: torch.device, session: Session) -> list[Link]:
    """Measure this rank's links to others, one pair after the other; the pair's first rank returns
    the result.
    """
    size = 2**26 if device.type == "cuda" else 2**20  # elements of 4 bytes
    small, large = torch.zeros(1, device=device), torch.zeros(size, device=device)
    found = []
    for matches in pairs(session.ranks):
        for first, second in matches:
            if session.rank not in (first, second):
                continue
            other = second if session.rank == first else first
            _ping_pong(small, other, first=session.rank == first, times=1)  # connects
            latency = _ping_pong(small, other, first=session.rank == first, times=PING_PONGS)
            seconds = min(
                _ping_pong(large, other, first=session.rank == first, times=1) for _ in range(3)
            )
            if session.rank == first:
                found.append(
                    Link(first, second, latency, large.nbytes / max(seconds - latency, 1e-9))
                )
        dist.barrier()
    return found


def _ping_pong(tensor: torch.Tensor, other: int, *, first: bool, times: int) -> float:
    """Return the seconds that a message takes in one direction."""
    _synchronize(tensor.device)
    started = time.perf_counter()
    for _ in range(times):
        for sends in (first, not first):
            (dist.send if sends else dist.recv)(tensor, other)
    _synchronize(tensor.device)
    return (time.perf_counter() - started) / (2 * times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def expected_links(device: torch.device) -> Mapping[str, float]:
    """Return the published bytes per second of this GPU's links, within a machine and between
    machines.

    Without a file of this GPU they are infinitely slow: only differences are judged. {} for a CPU.
    """
    if device.type != "cuda":
        return {}
    try:
        this = devices.this()
    except ConfigError:
        return {"within": 0.0, "between": 0.0}
    return {"within": this.link_bytes_per_second, "between": this.network_bytes_per_second}


def link_findings(
    links: Sequence[Link],
    *,
    hosts: Sequence[str],
    name: Callable[[int], str],
    expected: Mapping[str, float],
) -> Iterator[Finding]:
    """Name the links that are slower than the others of their kind, and kinds slower than the
    hardware's links.

    Args:
        expected: bytes per second of the links `within` a machine and `between` machines; a missing
            one is not checked.
    """
    for kind, words in (("within", "within a machine"), ("between", "between machines")):
        of_kind = [
            link
            for link in links
            if (hosts[link.first] == hosts[link.second]) == (kind == "within")
        ]
        if not of_kind:
            continue
        typical = statistics.median_high(link.bandwidth for link in of_kind)
        latency = statistics.median(link.latency for link in of_kind)
        # CPU ranks of a machine share its cores: their speed varies
        judged = kind == "between" or bool(expected)
        slow = [link for link in of_kind if judged and link.bandwidth < SLOW * typical]
        yield from _slow_links(slow, of_kind, typical, name)
        published = expected.get(kind)
        measured = f"Links {words}: {_rate(typical)}, {latency * 1e6:.0f} µs"
        if published is not None and typical < EXPECTED_SHARE * published:
            yield warning(
                GROUP,
                f"{measured}; the hardware's give {_rate(published)}.",
                remedy=_SLOW_KIND[kind],
            )
        elif not slow:
            yield ok(
                GROUP, f"{measured}" + (f" (published: {_rate(published)})." if published else ".")
            )


def _slow_links(
    slow: Sequence[Link], links: Sequence[Link], typical: float, name: Callable[[int], str]
) -> Iterator[Finding]:
    """Name a rank if all its links are slow, else each slow link."""
    of_rank = {rank: [link for link in links if rank in (link.first, link.second)]
               for link in slow for rank in (link.first, link.second)}  # fmt: skip
    ranks = [
        rank for rank, own in of_rank.items() if len(own) > 1 and all(link in slow for link in own)
    ]
    for rank in ranks[:4]:
        share = statistics.median(link.bandwidth for link in of_rank[rank]) / typical
        what = f"All links of {name(rank)} have {share:.0%} of the others' bandwidth."
        yield warning(
            GROUP,
            what,
            remedy="Check that machine's network adapter and cable, or leave the machine out.",
        )
    for link in [link for link in slow if not {link.first, link.second} & set(ranks)][:8]:
        what = (
            f"The link between {name(link.first)} and {name(link.second)} has "
            f"{link.bandwidth / typical:.0%} of the "
        )
        yield warning(
            GROUP,
            f"{what}others' bandwidth: {_rate(link.bandwidth)}.",
            remedy="Check the cable and the switch.",
        )


# ------------------------------------------------------------ axes
def measure_axes(cfg: DictConfig, device: torch.device) -> list[AxisGroup]:
    """Measure all-reduces in this rank's group along each axis of the mesh that has several
    ranks.
    """
    sizes = Layout.of(cfg).axes
    if Layout.of(cfg).kind != "mesh":
        return [_measure_axis("data", device, dist.group.WORLD)]
    built = mesh.build(sizes, device_type=device.type)
    groups = {axis: built[axis].get_group() for axis in built.mesh_dim_names or ()}
    if sizes["context"] > 1:
        groups["context"] = mesh.context_group(built, context=sizes["context"])
    return [
        _measure_axis(axis, device, group) for axis, group in groups.items() if group.size() > 1
    ]


def _measure_axis(axis: str, device: torch.device, group: Any) -> AxisGroup:
    ranks = dist.get_process_group_ranks(group)
    small, large = (
        torch.ones(1, device=device),
        torch.ones(2**26 if device.type == "cuda" else 2**20, device=device),
    )
    _all_reduce_seconds(small, group)  # connects
    latency = min(_all_reduce_seconds(small, group) for _ in range(5))
    seconds = min(_all_reduce_seconds(large, group) for _ in range(3))
    sent = large.nbytes * 2 * (len(ranks) - 1) / len(ranks)
    return AxisGroup(axis, tuple(ranks), latency, sent / max(seconds - latency, 1e-9))


def _all_reduce_seconds(tensor: torch.Tensor, group: Any) -> float:
    _synchronize(tensor.device)
    started = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    _synchronize(tensor.device)
    return time.perf_counter() - started


def axis_findings(
    groups: Sequence[AxisGroup], *, hosts: Sequence[str], expected: Mapping[str, float]
) -> Iterator[Finding]:
    """Compare the groups of each axis with each other, and with what the links that they use should
    give.

    Args:
        expected: as in `link_findings`.
    """
    for axis in dict.fromkeys(each.axis for each in groups):
        own = [each for each in groups if each.axis == axis]
        crosses = any(len({hosts[rank] for rank in each.ranks}) > 1 for each in own)
        kind, words = ("between", "between machines") if crosses else ("within", "within a machine")
        typical = statistics.median_high(each.bandwidth for each in own)
        latency = statistics.median(each.seconds for each in own)
        what = (
            f"axis {axis}, {words}: {len(own[0].ranks)} ranks all-reduce at {_rate(typical)}, "
            f"{latency * 1e6:.0f} µs"
        )
        slow = [each for each in own if (crosses or expected) and each.bandwidth < SLOW * typical]
        for each in slow[:4]:
            who, share = listed_ranks(each.ranks), each.bandwidth / typical
            slower = f"axis {axis}: {who} all-reduce at {share:.0%} of the other groups' speed."
            yield warning(GROUP, slower, remedy="Look at these ranks' links above.")
        published = expected.get(kind)
        if published is not None and typical < EXPECTED_SHARE * published:
            remedy = _SLOW_KIND[kind] + (
                " Or type a smaller strategy axis, so that it stays within a machine."
                if crosses
                else ""
            )
            yield warning(
                GROUP, f"{what}; the hardware's links give {_rate(published)}.", remedy=remedy
            )
        elif not slow:
            yield ok(GROUP, f"{what}.")


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
