"""Fork ranks on one machine that start, build a mesh, vote, and exchange what a save does.

Prints a line of JSON per number of ranks: bytes that all ranks write in each phase, to each other
and to the store's file, and the sockets of the rank that has most. The last line is of the largest
number: connections to a TCP store.

Usage: scale_ranks.py RANKS…
"""

import json
import os
import resource
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from armature.parallel import mesh, process_group

SOFT_LIMIT = 1024  # of open files, as most systems have it
FACTS = {"digests": {"callback": b"0" * 32}, "random": b"0" * 5056}  # of one rank


def start() -> None:
    process_group.init(timeout=timedelta(seconds=60))


def build() -> None:
    sizes = dict.fromkeys(mesh.AXES, 1) | {"shard": process_group.ranks()}
    mesh.build(sizes, device_type="cpu")


def vote() -> None:
    process_group.all_max(process_group.rank(), 0)


def save() -> None:
    process_group.broadcast_object(FACTS["digests"])
    process_group.gather_object(FACTS)
    process_group.on_rank_0(lambda: None)
    process_group.on_all_ranks(lambda: {"__0_0.distcp": {"bytes": 1, "sha256": "0" * 64}})


def written() -> int:
    return int(Path("/proc/self/io").read_text().split()[3])


def run(ranks: int, folder: Path, *, by_tcp: bool) -> dict[str, int]:
    """Return what the ranks, of which this process becomes one, have needed; {} but on rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = next((number for number in range(1, ranks) if os.fork() == 0), 0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {} if by_tcp else {"ARMATURE_STORE": str(folder / "store")}
    torch.set_num_threads(1)
    found = {}
    for phase in (start, build, vote) if by_tcp else (start, build, vote, save):
        before = written()
        phase()
        found[phase.__name__] = written() - before
    connections = psutil.Process().net_connections("tcp")
    found["sockets"] = len(connections)
    of_ranks = process_group.gather_object(found)
    for _ in range(2):  # rank 0 has the store, through which the first connects
        process_group.barrier()
    if by_tcp:
        return {"connections": sum(c.laddr.port == port and bool(c.raddr) for c in connections)}
    totals = {name: sum(each[name] for each in of_ranks) for name in found}
    return {**totals, "sockets": max((each["sockets"] for each in of_ranks), default=0)}


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    sizes = [*map(int, sys.argv[1:])]
    for ranks, by_tcp in [*((size, False) for size in sizes), (sizes[-1], True)]:
        with tempfile.TemporaryDirectory() as path:
            if (leader := os.fork()) == 0:
                found = run(ranks, Path(path), by_tcp=by_tcp)
                if process_group.rank() == 0:
                    print(json.dumps({"ranks": ranks, **found}), flush=True)
                os._exit(0)
            os.waitpid(leader, 0)


if __name__ == "__main__":
    main()
