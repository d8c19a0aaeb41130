"""Cells on two machines (network namespaces): the cable between them is cut in the middle of a
step.
"""

import subprocess
import sys
import time
from contextlib import ExitStack

from benchmarks.faults.cells import STOCK_SCRIPT, Command, Run, wait_until
from benchmarks.faults.matrix import Cell, Fault, finished, judge
from benchmarks.faults.two_hosts import RUN, Host, ip, two_hosts

HANG_TIMEOUT = 10  # seconds that a collective may take
PORT = 29512


def cut(fault: Fault, run: Run) -> Cell:
    """Cut the cable until the ranks have ended, reconnect it and start the commands again."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError):
            return Cell(fault.name, run.column.name, "– no network namespaces here")
        fault.arm(run)
        sides = [start(run, host, hosts[0]) for host in hosts]
        sides[0].wait_until(lambda: run.struck_at() is not None, run.column.limit)
        run.note_strike()
        for host in hosts:
            ip("-netns", host.namespace, "link", "set", host.interface, "down")
        run.release()
        # torchrun on the other machine cannot end yet: it queries the first one's store without a
        # timeout
        remarks = []
        if not wait_until(
            lambda: not run.living_ranks() and sides[0].process.poll() is not None, run.column.limit
        ):
            remarks.append(f"stuck, killed after {run.column.limit:.0f} s")
            run.kill()
        for host in hosts:
            ip("-netns", host.namespace, "link", "set", host.interface, "up")
        if sides[1].wait(run.column.limit) is None:
            remarks.append("torchrun stuck after the cable was reconnected")
            run.kill()
        if not finished(run):
            sides = [start(run, host, hosts[0]) for host in hosts]
            end = time.monotonic() + run.column.limit
            codes = [side.wait(max(end - time.monotonic(), 0.1)) for side in sides]
            if codes != [0, 0]:
                remarks.append(f"typed again: exit codes {codes}")
        return judge(fault, run, remarks)


def start(run: Run, host: Host, head: Host) -> Command:
    """Start one machine through torchrun."""
    inside = ["ip", "netns", "exec", host.namespace]
    variables = {
        "HEAD": f"{head.address}:{PORT}",
        "NODES": "2",
        "DEVICES": "1",
        "INTERFACE": host.interface,
    }
    if not run.column.stock:
        return run.start(
            [*inside, str(RUN), *run.arguments(), *run.overrides],
            PYTHON=sys.executable,
            **variables,
        )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
    ]
    torchrun += [f"--rdzv-endpoint={variables['HEAD']}", f"--local-addr={host.address}"]
    torchrun += ["--rdzv-conf", f"is_host={str(host is head).lower()}"]
    words = [*inside, *torchrun, str(STOCK_SCRIPT), *run.arguments(), "--ranks=1", "--nodes=2"]
    return run.start(words, GLOO_SOCKET_IFNAME=host.interface)


FAULTS = (
    Fault(
        "network_cut",
        "network cut",
        "at_hold",
        every_rank=True,
        overrides=(f"launch.hang_timeout={HANG_TIMEOUT}",),
        flow=cut,
        without={
            "single": "one machine has no network",
            "stock single": "one machine has no network",
        },
        within=90,
        lane="network",
    ),
)
