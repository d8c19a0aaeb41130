"""Collectives and links between the ranks: do they end, are they right, and are they as fast as the
hardware?
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from armature.doctor.finding import Finding, failure, listed, ok, warning
from armature.doctor.session import Session
from armature.errors import ConfigError
from armature.launcher import environment
from armature.layout import Layout
from armature.parallel import mesh, process_group
from armature.planning import devices

GROUP = "communication"
POLL_SECONDS = 0.001
SLOW = 0.6  # of the median: a rank or link below it is named
EXPECTED_SHARE = 0.4  # of the published rate of a link: what is measured below it is reported
MOST_ROUNDS = 16  # of pairs; with more ranks, only some pairs are measured
MOST_NAMED = 8
COMPUTE_SECONDS = 0.05
LINK = "link"  # a pair of ranks, beside the axes of the mesh
_REMEDIES = {
    "within": "Type nvidia-smi topo -m: NVLink may be off, or GPUs of different sockets were "
    "chosen.",
    "between": "NCCL may use Ethernet, not InfiniBand: type export NCCL_DEBUG=INFO and look for "
    "NET/IB; set NCCL_IB_HCA and NCCL_SOCKET_IFNAME. Or type a smaller strategy axis, so that it "
    "stays within a machine.",
}


class Rate(NamedTuple):
    """What ranks that communicate have measured.

    Args:
        axis: of the mesh, or LINK.
        seconds: of one number.
        bandwidth: bytes per second that each rank sends in a large message.
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
    with session.limit("forming the process group", seconds=4 * seconds):
        device = _init(cfg, session)
    with session.limit("barrier", seconds=seconds):
        _wait(dist.all_reduce(torch.ones(1, device=device), async_op=True))
    with session.limit("all-reduce", seconds=seconds):
        session.add(*reduced(device, ranks=session.ranks, name=session.name))
    with session.limit("speed of each rank", seconds=seconds):
        speeds = process_group.all_gather_object(compute_rate(device))
    with session.limit("speed of each link and axis", seconds=4 * seconds):
        own = [*measure_links(device, session), *measure_axes(cfg, device)]
        everyones = [each for part in process_group.all_gather_object(own) for each in part]
    if session.rank == 0:
        rates = [*{(each.axis, each.ranks): each for each in everyones}.values()]
        expected = expected_links(device)
        session.add(*rank_findings(speeds, name=session.name))
        session.add(
            *rate_findings(rates, hosts=session.hosts, name=session.name, expected=expected)
        )


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


def reduced(device: torch.device, *, ranks: int, name: Callable[[], str]) -> Iterator[Finding]:
    """Sum known numbers over the ranks.

    Every rank compares all of them with the sum that it computes itself.
    """
    index = torch.arange(2**18, device=device, dtype=torch.float64) % 997
    numbers = index * (dist.get_rank() + 1)
    _wait(dist.all_reduce(numbers, async_op=True))
    if wrong := int((numbers != index * (ranks * (ranks + 1) // 2)).sum()):
        what = f"{name()}: an all-reduce of {len(index)} numbers returned {wrong} wrong ones."
        remedy = "Try NCCL_P2P_DISABLE=1 and NCCL_ALGO=Ring; if it is right then, a link is broken."
        yield failure(GROUP, what, remedy=remedy)
    elif dist.get_rank() == 0:
        what = f"Collectives among {ranks} ranks end, and an all-reduce has the right value."
        yield ok(GROUP, what)


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
            _synchronize(device)
            count += 1
        best = max(best, count / seconds)
    return best


def rank_findings(speeds: Sequence[float], *, name: Callable[[int], str]) -> Iterator[Finding]:
    """Name the ranks that compute more slowly than the others."""
    typical = statistics.median_high(speeds)
    slow = [(rank, speed) for rank, speed in enumerate(speeds) if speed < SLOW * typical]
    for rank, speed in slow[:MOST_NAMED]:
        share = f"{speed / typical:.0%}"
        what = f"{name(rank)} computes at {share} of the others' speed; every step waits for it."
        remedy = (
            "Look there for another program (nvidia-smi, top), a throttled device (nvidia-smi -q "
            "-d PERFORMANCE), or fewer cores; else leave the machine out (Slurm: --exclude)."
        )
        yield warning(GROUP, what, remedy=remedy)
    if not slow:
        what = f"The {len(speeds)} ranks compute at the same speed, within {1 - SLOW:.0%}."
        yield ok(GROUP, what)


# ------------------------------------------------------------ links and axes
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


def measure_links(device: torch.device, session: Session) -> Iterator[Rate]:
    """Measure this rank's links to others, one pair after the other."""
    for matches in pairs(session.ranks):
        for pair in matches:
            if session.rank in pair:
                first = session.rank == pair[0]
                other = pair[first]

                def there_and_back(tensor: torch.Tensor, first=first, other=other) -> None:
                    for sends in (first, not first):
                        (dist.send if sends else dist.recv)(tensor, other)

                seconds, bandwidth = _measure(there_and_back, device, sent=2.0)
                yield Rate(LINK, pair, seconds / 2, bandwidth)
        dist.barrier()


def measure_axes(cfg: DictConfig, device: torch.device) -> Iterator[Rate]:
    """Measure all-reduces in this rank's group along each axis of the mesh that has several
    ranks.
    """
    layout = Layout.of(cfg)
    groups: dict[str, Any] = {"data": dist.group.WORLD}
    if layout.kind == "mesh":
        built = mesh.build(layout.axes, device_type=device.type)
        groups = {axis: built[axis].get_group() for axis in built.mesh_dim_names or ()}
        if layout.axes["context"] > 1:
            groups["context"] = mesh.context_group(built, context=layout.axes["context"])
    for axis, group in groups.items():
        if (count := group.size()) > 1:
            reduce = lambda tensor, group=group: dist.all_reduce(tensor, group=group)  # noqa: E731
            seconds, bandwidth = _measure(reduce, device, sent=2 * (count - 1) / count)
            yield Rate(axis, tuple(dist.get_process_group_ranks(group)), seconds, bandwidth)


def _measure(
    send: Callable[[torch.Tensor], object], device: torch.device, *, sent: float
) -> tuple[float, float]:
    """Return the seconds for one number, and the bytes per second of a large tensor.

    Args:
        sent: how often each rank sends the tensor.
    """

    def seconds(tensor: torch.Tensor) -> float:
        _synchronize(device)
        started = time.perf_counter()
        send(tensor)
        _synchronize(device)
        return time.perf_counter() - started

    small = torch.ones(1, device=device)
    large = torch.ones(2**26 if device.type == "cuda" else 2**20, device=device)
    seconds(small)  # connects
    latency = min(seconds(small) for _ in range(10))
    best = min(seconds(large) for _ in range(3))
    return latency, sent * large.nbytes / max(best - latency, 1e-9)


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


def rate_findings(
    rates: Sequence[Rate],
    *,
    hosts: Sequence[str],
    name: Callable[[int], str],
    expected: Mapping[str, float],
) -> Iterator[Finding]:
    """Name what is slower than the others of its kind, and kinds slower than the hardware's links.

    Args:
        expected: bytes per second of the links `within` a machine and `between` machines; a missing
            one is not checked.
    """
    kinds: dict[tuple[str, str], list[Rate]] = {}
    for each in rates:
        crosses = len({hosts[rank] for rank in each.ranks}) > 1
        kinds.setdefault((each.axis, "between" if crosses else "within"), []).append(each)
    for (axis, kind), own in kinds.items():
        words = "between machines" if kind == "between" else "within a machine"
        title = f"Links {words}" if axis == LINK else f"axis {axis}, {words}"
        typical = statistics.median_high(each.bandwidth for each in own)
        latency = statistics.median(each.seconds for each in own)
        # CPU ranks of a machine share its cores: their speed varies
        judged = kind == "between" or bool(expected)
        slow = [each for each in own if judged and each.bandwidth < SLOW * typical]
        for each in slow[:MOST_NAMED]:
            who = listed([name(rank) for rank in each.ranks])
            share = f"{each.bandwidth / typical:.0%} of the others' bandwidth"
            remedy = "Check the network adapter, the cable and the switch, or leave the machine out"
            yield warning(GROUP, f"{title}: {who}: {share}.", remedy=f"{remedy}.")
        published = expected.get(kind)
        what = f"{title}: {_rate(typical)}, {latency * 1e6:.0f} µs"
        if published is not None and typical < EXPECTED_SHARE * published:
            what = f"{what}; the hardware's give {_rate(published)}."
            yield warning(GROUP, what, remedy=_REMEDIES[kind])
        elif not slow:
            yield ok(GROUP, f"{what}.")


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
