"""Slurm: join the other ranks under `srun`, and find the job's time limit."""

import logging
import os
import re
import socket
import subprocess
import time
from contextlib import suppress

from omegaconf import DictConfig

from armature.errors import ConfigError
from armature.launcher import environment

log = logging.getLogger(__name__)
_OF_STEP = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


def join(cfg: DictConfig) -> None:
    """Make this process a rank if `srun` started it as one, or prepare it to start the ranks of its
    node.

    A rank's variables (`launcher.environment`) are set from Slurm's. With one task per node and
    several devices, `launch.rdzv_endpoint` is set instead, and the elastic agents of the nodes meet
    there. The shell of a batch script
    has SLURM_NTASKS too, but no step: there the elastic agent starts the ranks. A step whose nodes
    or tasks differ
    from the configuration is refused, since its ranks would wait for ever.
    """
    environ = os.environ
    if environment.is_joined() or tasks() < 2:
        return
    # where the ranks meet
    needed = [*_OF_STEP, *([] if environ.get("MASTER_ADDR") else ["SLURM_STEP_NODELIST"])]
    if lacking := [name for name in needed if not environ.get(name)]:
        raise ConfigError(
            f"SLURM_STEP_ID={environ['SLURM_STEP_ID']}, but {', '.join(lacking)} without a value, "
            "which srun sets: these variables are left from another job. Type unset SLURM_STEP_ID."
        )
    per_node = environ["SLURM_STEP_TASKS_PER_NODE"]  # such as 4(x2), or 3,1 if the nodes differ
    if "," in per_node:
        raise ConfigError(
            f"srun started {per_node} tasks on the nodes: every node must have the same number. "
            f"Type --nodes={cfg.trainer.num_nodes} --ntasks-per-node={cfg.trainer.devices}."
        )
    on_node, nodes = int(per_node.split("(")[0]), environment.number("SLURM_STEP_NUM_NODES", 1)
    if on_node == 1 and cfg.trainer.devices > 1:
        if cfg.trainer.num_nodes != nodes:
            raise ConfigError(
                f"trainer.num_nodes={cfg.trainer.num_nodes}, but srun started one task on each of "
                f"{nodes} nodes. Type trainer.num_nodes={nodes}."
            )
        cfg.launch.rdzv_endpoint = cfg.launch.rdzv_endpoint or f"{_first_host()}:{_port()}"
        return
    if environment.number("SLURM_PROCID", 0) >= tasks():
        raise ConfigError(
            f"SLURM_PROCID={environ['SLURM_PROCID']} of "
            f"SLURM_STEP_NUM_TASKS={environ['SLURM_STEP_NUM_TASKS']}: tasks of a heterogeneous job "
            "count over its components. Start the run in one component: srun --het-group=0."
        )
    environ.update(  # as a launcher does
        RANK=environ["SLURM_PROCID"],
        WORLD_SIZE=environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environ["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(on_node),
        GROUP_RANK=environ["SLURM_NODEID"],
        MASTER_ADDR=environ.get("MASTER_ADDR") or _first_host(),
        MASTER_PORT=environ.get("MASTER_PORT") or str(_port()),
    )


def tasks() -> int:
    """Return how many tasks `srun` started; 1 outside of a step."""
    return environment.number("SLURM_STEP_NUM_TASKS", 1) if "SLURM_STEP_ID" in os.environ else 1


def stop_at(minutes: float | None) -> float | None:
    """Return the Unix time at which a run should save and stop, or None: so many minutes before the
    job's end.

    A job whose limit is shorter than twice that stops when a quarter of its time remains.
    """
    if minutes is None:
        return None
    begin, end = (environment.number(f"SLURM_JOB_{word}_TIME", 0.0) for word in ("START", "END"))
    if not end:  # unknown, or without a limit
        return None
    if end <= time.time():
        if environment.rank() == 0:
            log.warning(
                "Slurm job %s should have ended already, by SLURM_JOB_END_TIME: these variables "
                "are left from another "
                "job, or its time limit was raised. The run does not stop ahead of a limit.",
                os.environ.get("SLURM_JOB_ID"),
            )
        return None
    duration = end - (begin or time.time())
    margin = minutes * 60
    return end - (margin if duration >= 2 * margin else duration / 4)


def _first_host() -> str:
    """Return the step's first node: its name, or its address in Slurm if the name is not in the
    DNS.
    """
    # a list such as rack[1-2]gpu[001-004,007]-ib,other
    name = re.split(r",(?![^\[]*\])", os.environ["SLURM_STEP_NODELIST"])[0]
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", name)
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        with suppress(OSError, subprocess.SubprocessError):  # a container without Slurm's programs
            fields = dict(field.split("=", 1) for field in _scontrol(host).split() if "=" in field)
            return fields.get("NodeAddr", host)
    return host


def _scontrol(node: str) -> str:
    command = ["scontrol", "show", "node", node]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _port() -> int:
    """Return a port that differs between the jobs on a machine, and between a job's restarts
    (orphaned ranks).
    """
    job, step, restart = (
        environment.number(f"SLURM_{name}", 0) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")
    )
    return 20000 + (job * 7 + step + restart * 3) % 12000
