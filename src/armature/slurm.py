"""Joining the other ranks under `srun`, which names them in variables of its own."""

import os
import subprocess


def join() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from Slurm's, where `srun` started several tasks.

    A batch script's own shell has SLURM_NTASKS too, but no step: there the elastic agent starts the ranks.
    """
    environ = os.environ
    if "RANK" in environ or "SLURM_STEP_ID" not in environ or int(environ.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ["SLURM_STEP_NUM_TASKS"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    environ["GROUP_RANK"] = environ["SLURM_NODEID"]
    environ["LOCAL_WORLD_SIZE"] = environ["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0]
    if "MASTER_ADDR" not in environ:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", environ["SLURM_STEP_NODELIST"]], capture_output=True, text=True, check=True
        )
        environ["MASTER_ADDR"] = hosts.stdout.split()[0]
    # jobs that share a machine get different ports; a restarted step gets a new one
    environ.setdefault("MASTER_PORT", str(20000 + (int(environ["SLURM_JOB_ID"]) * 7 + int(environ["SLURM_STEP_ID"])) % 20000))
