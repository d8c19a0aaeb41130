"""How the ranks are started: world size, Slurm's tasks, variables of another job, where the ranks
meet. Torch-free.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout
from functools import partial

import psutil
from omegaconf import DictConfig

from armature.doctor import finding
from armature.doctor.finding import Finding, failure, ok, warning
from armature.launcher import environment, supervise

GROUP = "launch"
LOOKUP_SECONDS = 10.0  # a name server that does not answer is asked for minutes
ANSWER_SECONDS = 5.0
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def check(cfg: DictConfig, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Return the findings that need no other rank."""
    environ = os.environ if environ is None else environ
    found = finding.gathered(
        GROUP,
        partial(leftovers, environ),
        partial(world_size, cfg, environ),
        partial(slurm_tasks, cfg, environ),
        partial(interfaces, environ),
        partial(loopback, cfg, environ),
    )
    return found or [ok(GROUP, "No variables are left from another job.")]


def leftovers(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables of ranks that no launcher of this process has set: the shell kept them from
    another job.
    """
    started = (
        "TORCHELASTIC_RUN_ID" in environ
        or "SLURM_STEP_ID" in environ
        or "OMPI_COMM_WORLD_RANK" in environ
    )
    present = [name for name in RANK_VARIABLES if environ.get(name)]
    ours = [
        name
        for name in environ
        if name.startswith("ARMATURE_") and name in environment.SET_FOR_RANKS
    ]
    if present and not started and not ours:
        known = ", ".join(f"{name}={environ[name]}" for name in present)
        joined = environ.get("RANK") and environ.get("WORLD_SIZE")
        effect = (
            f"this process takes itself for rank {environ['RANK']} and waits for the others"
            if joined
            else ("another launcher would use them")
        )
        yield warning(
            GROUP,
            f"{known}: set, but neither torchrun nor srun started this process, so {effect}.",
            remedy=f"If they are left from another job, type unset {' '.join(present)}",
        )
    elif ours and "RANK" not in environ:
        names = " ".join(sorted(ours))
        what = f"{names}: set in this shell; only a run sets them for its own ranks."
        yield warning(GROUP, what, remedy=f"Type unset {names}")
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and int(end) < time.time():
        what = (
            f"SLURM_JOB_ID={environ.get('SLURM_JOB_ID')}: this job should have ended already "
            "(SLURM_JOB_END_TIME)."
        )
        remedy = (
            "If the variables are left from it, start a new shell, or in bash type unset "
            "${!SLURM_@}"
        )
        yield warning(GROUP, what, remedy=remedy)


def world_size(cfg: DictConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the ranks that the launcher has started with those that the configuration asks
    for.
    """
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return
    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    numbers = {name: environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")}
    if bad := [f"{name}={value}" for name, value in numbers.items() if not value.isdecimal()]:
        yield failure(
            GROUP, f"{', '.join(bad)}: no number.", remedy=f"Type unset {' '.join(RANK_VARIABLES)}"
        )
        return
    started, local, rank = (int(value) for value in numbers.values())
    if rank >= started:
        what = f"RANK={rank}, but WORLD_SIZE={started}: ranks are numbered from 0."
        yield failure(GROUP, what, remedy="Correct the launcher's script.")
    elif started != devices * nodes:
        each = (
            local if "LOCAL_WORLD_SIZE" in environ and local and started % local == 0 else started
        )
        yield failure(
            GROUP,
            f"trainer.devices={devices} × trainer.num_nodes={nodes} asks for {devices * nodes} "
            "ranks, but the launcher "
            f"started {started}.",
            remedy=f"Type trainer.devices={each} trainer.num_nodes={started // each}, or start "
            f"{devices * nodes}.",
        )


def slurm_tasks(cfg: DictConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Compare a Slurm job's nodes, tasks per node and GPUs with trainer.devices and
    trainer.num_nodes.
    """
    if "SLURM_JOB_ID" not in environ:
        return
    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    in_step = "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    job_nodes = int(environ.get("SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES", "1"))
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE" if in_step else "SLURM_TASKS_PER_NODE", "1")
    per_node = tasks.split("(")[0]
    if "," in tasks:
        yield failure(
            GROUP,
            f"Slurm runs {tasks} tasks on the nodes: every node must have the same number.",
            remedy=f"Type --nodes={nodes} --ntasks-per-node={devices}.",
        )
    elif in_step and per_node.isdecimal() and int(per_node) not in (1, devices):
        yield failure(
            GROUP,
            f"srun started {per_node} tasks per node, but trainer.devices={devices}: one per "
            "device, or one per node.",
            remedy=f"Type --ntasks-per-node={devices} for srun, or trainer.devices={per_node}.",
        )
    if job_nodes != nodes:
        where = "srun's step" if in_step else "the Slurm job"
        how = "" if in_step else ", and start it with srun"
        kind = failure if in_step or nodes > job_nodes else warning
        what = f"trainer.num_nodes={nodes}, but {where} has {job_nodes} nodes."
        yield kind(
            GROUP, what, remedy=f"Type trainer.num_nodes={job_nodes}{how}, or --nodes={nodes}."
        )
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if cfg.trainer.accelerator == "gpu" and gpus.isdecimal() and int(gpus) < devices:
        what = f"trainer.devices={devices}, but Slurm gave this job {gpus} GPUs on this node."
        yield failure(
            GROUP, what, remedy=f"Type --gpus-per-node={devices}, or trainer.devices={gpus}."
        )


def interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the network interfaces that NCCL and gloo are told to use."""
    for what, remedy in environment.unknown_interfaces(environ):
        yield failure(GROUP, what, remedy=remedy)


def loopback(cfg: DictConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the interface through which ranks that this command starts on one machine connect."""
    name = supervise.loopback_variables().get("GLOO_SOCKET_IFNAME")
    if (
        environ.get("RANK")
        or cfg.launch.rdzv_endpoint
        or cfg.trainer.devices * cfg.trainer.num_nodes == 1
        or not name
    ):
        return
    families = {entry.family for entry in psutil.net_if_addrs().get(name, [])}
    if not families & {socket.AF_INET, socket.AF_INET6}:
        remedy = (
            f"Type ip link set {name} up (as root), or export GLOO_SOCKET_IFNAME= with "
            "another interface."
        )
        what = f"The network interface {name} is down: the ranks of a machine connect through it."
        yield failure(GROUP, what, remedy=remedy)


# ------------------------------------------------------------ where the ranks meet
def resolved(address: str) -> list[str]:
    """Return the addresses of a host name, or [] if it does not resolve in LOOKUP_SECONDS."""
    pool = ThreadPoolExecutor(1)
    try:
        found = pool.submit(socket.getaddrinfo, address, None, type=socket.SOCK_STREAM).result(
            LOOKUP_SECONDS
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    except (OSError, UnicodeError, LookupTimeout):
        return []
    finally:
        pool.shutdown(wait=False)


def unresolved(address: str) -> Finding:
    return failure(
        GROUP,
        f"MASTER_ADDR={address}: this machine cannot resolve the name.",
        remedy=environment.EXPORT_NAME,
    )


def port_findings(address: str, port: int) -> list[Finding]:
    """Return why rank 0 cannot listen at MASTER_ADDR:MASTER_PORT, or [] if it can."""
    if not (addresses := resolved(address)):
        return [unresolved(address)]
    mine = {
        entry.address.split("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    }
    if not mine & set(addresses) and not any(each.startswith("127.") for each in addresses):
        return [
            failure(
                GROUP,
                f"MASTER_ADDR={address} ({addresses[0]}) is no address of {socket.gethostname()}, "
                "where rank 0 runs.",
                remedy="Export MASTER_ADDR with the name of rank 0's machine (in Slurm: scontrol "
                "show hostnames | "
                "head -n 1), or start rank 0 there.",
            )
        ]
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            why = (
                f"is taken{_taken_by(port)}"
                if error.errno == errno.EADDRINUSE
                else f"cannot be used ({error.strerror})"
            )
            remedy = (
                f"Type export MASTER_PORT={_free_port()} (the same on all nodes), or end "
                "that process."
            )
            return [
                failure(
                    GROUP, f"MASTER_PORT={port} {why} on {socket.gethostname()}.", remedy=remedy
                )
            ]
    return []


def _taken_by(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                with contextlib.suppress(psutil.Error):
                    return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def answer_findings(address: str, port: int, *, rank: int) -> list[Finding]:
    """Return why this rank does not reach rank 0 at MASTER_ADDR:MASTER_PORT; called when it did not
    in time.
    """
    if not (addresses := resolved(address)):
        return [unresolved(address)]
    name, place = f"MASTER_ADDR={address} MASTER_PORT={port}", addresses[0]
    try:
        with socket.create_connection((place, port), timeout=ANSWER_SECONDS):
            what = f"{name}: something else than rank 0 listens there."
            remedy = "Export another MASTER_PORT, the same on all nodes."
    except ConnectionRefusedError:
        what = (
            f"{name}: {place} answers, but nothing listens at this port: rank 0 has not "
            "started there."
        )
        remedy = (
            "Check that MASTER_ADDR is the machine of rank 0 and that all nodes have the "
            "same MASTER_PORT."
        )
    except OSError:
        what = f"{name}: {place} does not answer."
        remedy = (
            "Check the address; if it is right, a firewall is between the nodes, or it is the "
            "address of a network "
            "that this node is not in (set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME)."
        )
    return [failure(GROUP, what, remedy=remedy, where=f"rank {rank} on {socket.gethostname()}")]
