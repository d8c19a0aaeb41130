"""Slurm: joining the other ranks under `srun`, which names them in variables of its own, and the job's time limit."""

import os
import socket
import subprocess
import time

from omegaconf import DictConfig

from armature.errors import ConfigError
from armature.launcher import environment


def join(cfg: DictConfig) -> None:
    """Makes this process what `srun` started it as: a rank, or one task a node with the elastic agent beneath it.

    A rank gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from Slurm's variables. Where there is one
    task a node and several devices, `launch.rdzv_endpoint` is set instead, and the agents meet there. A batch script's
    own shell has SLURM_NTASKS too, but no step: there the elastic agent starts the ranks.

    Raises:
        ConfigError: where the step has other nodes or tasks than the configuration asks for, which would wait for ever.
    """
    environ = os.environ
    if environment.is_joined() or "SLURM_STEP_ID" not in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    layout = environ["SLURM_STEP_TASKS_PER_NODE"]  # such as 4(x2), or 3,1 where the nodes differ
    if "," in layout:
        raise ConfigError(
            f"srun started {layout} tasks on the nodes: every node must have as many. "
            f"Type --nodes={cfg.trainer.num_nodes} --ntasks-per-node={cfg.trainer.devices}."
        )
    tasks, nodes = int(layout.split("(")[0]), int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks == 1 and cfg.trainer.devices > 1:
        if cfg.trainer.num_nodes != nodes:
            raise ConfigError(
                f"trainer.num_nodes={cfg.trainer.num_nodes}, but srun started one task on each of {nodes} nodes. "
                f"Type trainer.num_nodes={nodes}."
            )
        cfg.launch.rdzv_endpoint = cfg.launch.rdzv_endpoint or f"{_first_host()}:{_port()}"
        return
    environment.set_rank(
        rank=environ["SLURM_PROCID"],
        world_size=environ["SLURM_STEP_NUM_TASKS"],
        local_rank=environ["SLURM_LOCALID"],
        local_world_size=str(tasks),
        node_rank=environ["SLURM_NODEID"],
        main_address=_first_host,
        main_port=_port(),
    )


def deadline() -> float | None:
    """When the job will be ended, as Unix time; None outside of a job, and where it has no limit."""
    return _times()[1]


def stop_at(minutes: float | None) -> float | None:
    """When a run should save and stop, as Unix time, so many minutes before the job is ended; None: never.

    A job whose limit is less than twice as long stops when a quarter of it is left.
    """
    if minutes is None:
        return None
    begin, end = _times()
    if end is None:
        return None
    whole = end - (begin if begin is not None else time.time())
    margin = minutes * 60
    return end - (margin if whole >= 2 * margin else whole / 4)


def _times() -> tuple[float | None, float | None]:
    """The job's begin and end, as Unix time. Slurm before 22.05 sets no variables: the controller is asked."""
    environ = os.environ
    if "SLURM_JOB_END_TIME" in environ:
        begin = environ.get("SLURM_JOB_START_TIME")
        return float(begin) if begin else None, float(environ["SLURM_JOB_END_TIME"])
    if "SLURM_JOB_ID" not in environ or environment.rank() != 0:  # one question a job; the ranks agree
        return None, None
    try:
        text = _scontrol("job", environ["SLURM_JOB_ID"])
    except (OSError, subprocess.SubprocessError):  # a container without Slurm's programs
        return None, None
    fields = dict(field.split("=", 1) for field in text.split() if "=" in field)
    if fields.get("TimeLimit") == "UNLIMITED":
        return None, None
    return _unix(fields.get("StartTime")), _unix(fields.get("EndTime"))


def _unix(text: str | None) -> float | None:
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown
        return None


def _first_host() -> str:
    """The step's first node: its name, or the address that Slurm knows it by where the name is not in the DNS."""
    host = _scontrol("hostnames", os.environ["SLURM_STEP_NODELIST"]).split()[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        fields = dict(field.split("=", 1) for field in _scontrol("node", host).split() if "=" in field)
        return fields.get("NodeAddr", host)
    return host


def _scontrol(*what: str) -> str:
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    command = ["scontrol", "show", *what]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=60).stdout


def _port() -> int:
    """Jobs that share a machine get different ports, and a restarted job never meets a rank that was left behind."""
    job, step, restart = (int(os.environ.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return 20000 + (job * 7 + step + restart * 3) % 12000
