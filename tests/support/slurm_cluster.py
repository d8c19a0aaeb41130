"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd, with all their files in
one folder.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import forked, running

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "squeue",
    "sinfo",
)
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CPUS = 16  # more than the machine has, so that jobs run side by side

# A requeued job waits for its old credential to expire, and a stopped one is killed after KillWait.
CONF = """\
ClusterName=armature
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
JobRequeue=1
KillWait=20
MinJobAge=600
MpiDefault=none
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldDebug=info
SlurmdDebug=info
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=8000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=8000
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return why no Slurm can be started here, or None if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "starting a Slurm takes root"
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return (
        f"Slurm is not installed (no {', '.join(absent)}): apt-get install slurm-wlm munge"
        if absent
        else None
    )


@dataclass
class Cluster:
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, check: bool = True, **extra: str) -> str:
        """Run one of Slurm's programs and return its output."""
        result = subprocess.run(
            command,
            env={**self.environment, **extra},
            cwd=running.ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout + result.stderr

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def wait_for_state(self, job: str, *states: str, seconds: float) -> dict[str, str]:
        end = time.monotonic() + seconds
        while (found := self.job(job))["JobState"] not in states:
            assert time.monotonic() < end, (
                f"job {job} is {found['JobState']}, not {states}, after {seconds} s"
            )
            time.sleep(0.3)
        return found


@contextlib.contextmanager
def start(folder: Path) -> Iterator[Cluster]:
    """Start Slurm, and end every process that it started."""
    host = socket.gethostname().split(".")[0]
    folder.chmod(0o755)
    (folder / "state").mkdir()
    conf, key, munge = folder / "slurm.conf", folder / "munge.key", folder / "munge.socket"
    ports = [forked.free_port() for _ in range(3)]
    conf.write_text(CONF.format(host=host, folder=folder, ports=ports, cpus=CPUS))
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    environment = {**running.environment(), "PATH": PATH, "SLURM_CONF": str(conf)}
    files = [f"--{name}-file={folder / f'munge.{name}'}" for name in ("pid", "log", "seed")]
    commands = {
        "munged": [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={munge}",
            *files,
        ],
        "slurmctld": ["slurmctld", "-D", "-i"],
        "node1": ["slurmd", "-D", "-N", "node1"],
        "node2": ["slurmd", "-D", "-N", "node2"],
    }
    daemons = []
    try:
        for name, command in commands.items():
            if name == "slurmctld":
                running.wait_for(munge.exists, seconds=10, what="munged's socket")
            with (folder / f"{name}.out").open("w") as log:
                daemons.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        cluster = Cluster(folder, environment)
        up = ["sinfo", "--noheader", "--Node", "--partition=batch", "--format=%t"]
        running.wait_for(
            lambda: cluster.run(*up, check=False).split() == ["idle"] * 2,
            seconds=30,
            what="two idle nodes",
        )
        yield cluster
    finally:
        # Processes of jobs detach themselves. Find them by their SLURM_CONF, and slurmstepd (which
        # overwrites its environment with its title) as a parent of such a process.
        left = [process for process in psutil.process_iter() if _belongs(process, str(conf))]
        for process in [*(parent for child in left for parent in _steps_above(child)), *left]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in daemons:
            daemon.wait()


def _belongs(process: psutil.Process, conf: str) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get("SLURM_CONF") == conf
    except (psutil.Error, OSError):
        return False


def _steps_above(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [parent for parent in process.parents() if parent.name() == "slurmstepd"]
    except psutil.Error:
        return []
