"""Variables that a launcher has left, and where the ranks meet. Torch-free."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout

import psutil

from armature.doctor.finding import Finding, failure, ok, warning
from armature.launcher import environment

GROUP = "launch"
LOOKUP_SECONDS = 10.0  # a name server that does not answer is asked for minutes
ANSWER_SECONDS = 5.0
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK")  # each sets one
OF_RANKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    *environment.SET_FOR_RANKS,
)


def leftovers(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Find variables of ranks that no launcher of this process has set: the shell kept them from
    another job.
    """
    present = [name for name in OF_RANKS if environ.get(name)]
    sound = True
    if present and not any(name in environ for name in LAUNCHERS):
        sound = False
        known = ", ".join(f"{name}={environ[name]}" for name in present)
        what = f"{known}: set, but neither torchrun nor srun started this process."
        remedy = f"If they are left from another job, type unset {' '.join(present)}"
        yield warning(GROUP, what, remedy=remedy)
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and int(end) < time.time():
        sound = False
        job = f"SLURM_JOB_ID={environ.get('SLURM_JOB_ID')}"
        what = f"{job}: this job should have ended already (SLURM_JOB_END_TIME)."
        remedy = "If the variables are left from it, start a new shell."
        yield warning(GROUP, what, remedy=remedy)
    if sound:
        yield ok(GROUP, "No variables are left from another job.")


def resolved(address: str) -> str | None:
    """Return the address of a host name, or None if it does not resolve in LOOKUP_SECONDS."""
    pool = ThreadPoolExecutor(1)
    try:
        asked = pool.submit(socket.getaddrinfo, address, None, type=socket.SOCK_STREAM)
        return str(asked.result(LOOKUP_SECONDS)[0][4][0])
    except (OSError, UnicodeError, LookupTimeout):
        return None
    finally:
        pool.shutdown(wait=False)


def why_unreachable(address: str, port: int, *, listens: bool) -> Finding | None:
    """Return why the ranks cannot meet at MASTER_ADDR:MASTER_PORT, as far as this rank sees it.

    Args:
        listens: this is rank 0, at which the others meet.
    """
    here, found = socket.gethostname(), resolved(address)
    if found is None:
        what = f"MASTER_ADDR={address}: this machine cannot resolve the name."
        return failure(GROUP, what, remedy=environment.EXPORT_NAME, where=here)
    return _why_deaf(address, found, port) if listens else _why_mute(address, found, port)


def _why_deaf(address: str, found: str, port: int) -> Finding | None:
    here, interfaces = socket.gethostname(), psutil.net_if_addrs().values()
    mine = {entry.address.split("%")[0] for entries in interfaces for entry in entries}
    if found not in mine and not found.startswith("127."):
        what = f"MASTER_ADDR={address} ({found}) is no address of {here}, where rank 0 runs."
        remedy = f"{environment.EXPORT_NAME} Or start rank 0 there."
        return failure(GROUP, what, remedy=remedy)
    with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            what = f"MASTER_PORT={port} cannot be used on {here} ({error.strerror}){_user_of(port)}"
            remedy = "Export another MASTER_PORT (the same on all nodes), or end that process."
            return failure(GROUP, f"{what}.", remedy=remedy)
    return None


def _user_of(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                name = psutil.Process(connection.pid).name()
                return f": {name} (process {connection.pid}) has it"
    return ""


def _why_mute(address: str, found: str, port: int) -> Finding:
    name = f"MASTER_ADDR={address} MASTER_PORT={port}"
    try:
        with socket.create_connection((found, port), timeout=ANSWER_SECONDS):
            what = f"{name}: something else than rank 0 listens there."
            remedy = "Export another MASTER_PORT, the same on all nodes."
    except ConnectionRefusedError:
        what = f"{name}: {found} answers, but nothing listens there: rank 0 has not started."
        remedy = (
            "Check that MASTER_ADDR is the machine of rank 0 and that all nodes have the "
            "same MASTER_PORT."
        )
    except OSError:
        what = f"{name}: {found} does not answer."
        remedy = (
            "Check the address; if it is right, a firewall is between the nodes, or it is of a "
            "network that this node is not in (set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME)."
        )
    where = f"rank {environment.rank()} on {socket.gethostname()}"
    return failure(GROUP, what, remedy=remedy, where=where)
