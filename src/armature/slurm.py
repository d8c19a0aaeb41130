"""Joining the other ranks under `srun`, which names them in variables of its own."""

import os
import socket
import subprocess

from omegaconf import DictConfig

from armature.errors import ConfigError


def join(cfg: DictConfig) -> None:
    """Makes this process what `srun` started it as: a rank, or one task a node with the elastic agent beneath it.

    A rank gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from Slurm's variables. Where there is one
    task a node and several devices, `launch.rdzv_endpoint` is set instead, and the agents meet there. A batch script's
    own shell has SLURM_NTASKS too, but no step: there the elastic agent starts the ranks.

    Raises:
        ConfigError: where the step has other nodes or tasks than the configuration asks for, which would wait for ever.
    """
    environ = os.environ
    if "RANK" in environ or "SLURM_STEP_ID" not in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
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
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ["SLURM_STEP_NUM_TASKS"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ["GROUP_RANK"] = environ["SLURM_NODEID"]
    environ["LOCAL_WORLD_SIZE"] = str(tasks)
    if "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = _first_host()
    environ.setdefault("MASTER_PORT", str(_port()))


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
    return subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, check=True).stdout


def _port() -> int:
    """Jobs that share a machine get different ports, and a restarted job never meets a rank that was left behind."""
    job, step, restart = (int(os.environ.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    return 20000 + (job * 7 + step + restart * 3) % 12000
