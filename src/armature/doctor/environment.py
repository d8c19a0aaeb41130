"""This machine: packages, GPUs, their driver, limits on memory, files and threads. Torch-free."""

import math
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from armature import hardware
from armature.doctor import finding
from armature.doctor.finding import Finding, failure, ok, warning

GROUP = "environment"
REQUIREMENTS = Path(__file__).parents[3] / "requirements.txt"
# bytes: NCCL's buffers between the ranks of a machine, and batches of loader workers
SHM_PER_RANK = 256 * 2**20
# bytes: a rank's imports take 0.7 GiB, a small model and its data the rest
MEMORY_PER_RANK = 2 * 2**30
# of loader workers, libraries and data; and rank 0's connections to each rank: gloo's of two
# groups, and those of the store that each axis of a mesh opens
OPEN_FILES, OPEN_FILES_PER_RANK = 1024, 16
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
GiB = 2**30


def check(cfg: DictConfig) -> list[Finding]:
    """Return the findings about this machine."""
    where = socket.gethostname()
    found = finding.gathered(
        GROUP,
        partial(versions, _required(), _installed),
        partial(gpus, cfg, os.environ),
        partial(shared_memory, cfg),
        partial(open_files, cfg),
        partial(memory, cfg),
        partial(threads, cfg, os.environ),
    )
    return [Finding(each.level, each.group, each.what, each.remedy, where) for each in found]


# ------------------------------------------------------------ packages
def _required() -> list[str]:
    lines = REQUIREMENTS.read_text().splitlines() if REQUIREMENTS.is_file() else []
    return [line for line in lines if line and not line.startswith("#")]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(required: list[str], installed: Any) -> Iterator[Finding]:
    """Compare installed packages with requirement lines.

    `installed(name)` returns a version or None.
    """
    from packaging.requirements import Requirement

    wrong = False
    for line in required:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed(requirement.name)
        remedy = f"Type pip install '{requirement.name}{requirement.specifier}'."
        if version is None:
            wrong = True
            yield failure(GROUP, f"{requirement.name} is not installed.", remedy=remedy)
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong = True
            what = (
                f"{requirement.name} {version} is installed, but this project needs "
                f"{requirement.specifier}."
            )
            yield failure(GROUP, what, remedy=remedy)
    if required and not wrong:
        yield ok(GROUP, f"All {len(required)} required packages have versions that go together.")


# ------------------------------------------------------------ GPUs
def gpus(cfg: DictConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the visible GPUs with trainer.devices, and the driver with the CUDA that torch was
    built for.
    """
    visible, devices = environ.get("CUDA_VISIBLE_DEVICES"), cfg.trainer.devices
    count, has_card = (
        hardware.gpu_count(),
        Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None,
    )
    if cfg.trainer.accelerator != "gpu":
        if has_card and not count:
            hidden = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
            what = (
                f"This machine seems to have GPUs, but the driver shows none{hidden}, so the "
                "run uses the CPU."
            )
            yield warning(
                GROUP,
                what,
                remedy="Type nvidia-smi; if it fails, the driver must be installed or reloaded.",
            )
        return
    torch_version = _installed("torch") or ""
    if "+cpu" in torch_version:
        yield failure(
            GROUP,
            f"torch {torch_version} was built without CUDA, but trainer.accelerator=gpu.",
            remedy="Type pip install --force-reinstall torch, from PyTorch's index for your CUDA.",
        )
    if count < devices:
        shown = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "the driver"
        yield failure(
            GROUP,
            f"trainer.devices={devices}, but {shown} shows {count} GPUs.",
            remedy=_more_gpus(count, devices, environ),
        )
    else:
        yield ok(GROUP, f"{count} GPUs are visible.")
    built = re.search(r"\+cu(\d+)(\d)", torch_version)
    driver = hardware.cuda_driver_version()
    if built and driver and driver < (int(built[1]), 0):
        yield failure(
            GROUP,
            f"torch {torch_version} was built for CUDA {built[1]}.{built[2]}, but the driver "
            "supports up to "
            f"{driver[0]}.{driver[1]}.",
            remedy=f"Update the NVIDIA driver, or install a torch built for CUDA {driver[0]}.",
        )


def _more_gpus(count: int, devices: int, environ: Mapping[str, str]) -> str:
    if (
        count == 1
        and environ.get("SLURM_STEP_ID")
        and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    ):
        bound = "Each task must see all GPUs of its node: remove --gpus-per-task, --gpu-bind"
        return (
            f"{bound} and CUDA_VISIBLE_DEVICES from the command, and type "
            f"--gpus-per-node={devices}."
        )
    return f"Type trainer.devices={count}, or ask the scheduler for {devices} GPUs per node."


# ------------------------------------------------------------ limits
def shared_memory(cfg: DictConfig, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check the room in /dev/shm, which loader workers and NCCL need; a container has 64 MiB by
    default.
    """
    workers = OmegaConf.select(cfg, "data.num_workers") or 0
    if not folder.is_dir() or (not workers and cfg.trainer.accelerator != "gpu"):
        return
    free, needed = shutil.disk_usage(folder).free, SHM_PER_RANK * cfg.trainer.devices
    if free < needed:
        what = (
            f"{folder} has {free / 2**20:.0f} MiB free; {cfg.trainer.devices} ranks need about "
            f"{needed / GiB:.1f} GiB"
        )
        why = ", or loader workers die with a bus error." if workers else "."
        remedy = "In Docker type --shm-size=16g or --ipc=host; otherwise remove old files from it."
        yield warning(GROUP, what + why, remedy=remedy)
    else:
        yield ok(GROUP, f"{folder} has {free / GiB:.1f} GiB free.")


def open_files(cfg: DictConfig, hard: int | None = None) -> Iterator[Finding]:
    """Check the hard limit of open files, to which ranks raise their own: connections, loader
    workers' tensors and shards of data count.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard
    ranks = cfg.trainer.devices * cfg.trainer.num_nodes
    needed = OPEN_FILES + OPEN_FILES_PER_RANK * ranks
    if 0 <= limit < needed:
        what = f"A process may open {limit} files; {ranks} ranks may need {needed}."
        yield warning(
            GROUP, what, remedy="Ask for a hard limit of 65536 (ulimit -Hn, LimitNOFILE)."
        )
    else:
        yield ok(GROUP, "The limit of open files is high enough.")


def _cgroup_files(name: str, first_version: str, root: Path, own: Path) -> Iterator[Path]:
    """Return where a limit may stand: in this process's control group and all groups around it.

    Slurm limits the group of the job or the step, not that of each task.
    """
    groups = {Path()}
    for line in own.read_text().splitlines() if own.is_file() else []:
        path = Path(line.split(":", 2)[2].lstrip("/"))
        groups |= {path, *path.parents}
    controller, _, file = first_version.partition("/")
    for group in sorted(groups):
        yield from (root / group / name, root / controller / group / file)


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float:
    """Return how many cores' time a container or job may use (Docker: --cpus), or infinity."""
    quota = math.inf
    for file in _cgroup_files("cpu.max", "cpu/cpu.cfs_quota_us", root, own):
        with suppress(OSError, ValueError):  # no such file, or "max"
            if file.name == "cpu.max":
                allowed, period = map(int, file.read_text().split())
            else:
                allowed, period = (
                    int(file.read_text()),
                    int(file.with_name("cpu.cfs_period_us").read_text()),
                )
            quota = min(quota, allowed / period if allowed > 0 else math.inf)
    return quota


def memory_limits(
    root: Path = CGROUPS, own: Path = OWN_CGROUP, environ: Mapping[str, str] = os.environ
) -> dict[str, int]:
    """Return the limits on this process's memory in bytes, by what sets them: the machine, a
    cgroup, Slurm.
    """
    limits = {"the machine": psutil.virtual_memory().total}
    for file in _cgroup_files("memory.max", "memory/memory.limit_in_bytes", root, own):
        try:
            value = int(file.read_text())
        except (OSError, ValueError):  # "max"
            continue
        if 0 < value < limits["the machine"]:
            limits["the container's or job's cgroup"] = min(
                value, limits.get("the container's or job's cgroup", value)
            )
    per_node, per_cpu = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_MEM_PER_CPU", "")
    if per_node.isdigit() and int(per_node):
        limits["Slurm (--mem)"] = int(per_node) * 2**20
    elif per_cpu.isdigit() and (cpus := environ.get("SLURM_CPUS_ON_NODE", "")).isdigit():
        limits["Slurm (--mem-per-cpu)"] = int(per_cpu) * int(cpus) * 2**20
    return limits


def memory(cfg: DictConfig, limits: Mapping[str, int] | None = None) -> Iterator[Finding]:
    """Compare the smallest memory limit with what the ranks of a machine need at least."""
    limits = memory_limits() if limits is None else limits
    name, limit = min(limits.items(), key=lambda item: item[1])
    devices, workers = cfg.trainer.devices, OmegaConf.select(cfg, "data.num_workers") or 0
    needed = devices * (MEMORY_PER_RANK + workers * GiB // 4)
    if limit < needed:
        yield warning(
            GROUP,
            f"{name[0].upper()}{name[1:]} allows {limit / GiB:.1f} GiB; {devices} ranks with "
            f"{workers} loader workers "
            f"each need at least about {needed / GiB:.1f} GiB. A process that exceeds it is killed "
            "without a word.",
            remedy="Ask for more memory (Slurm: --mem=0; Docker: --memory), or type fewer "
            "data.num_workers.",
        )
    else:
        yield ok(GROUP, f"{name[0].upper()}{name[1:]} allows {limit / GiB:.1f} GiB of memory.")


def threads(
    cfg: DictConfig, environ: Mapping[str, str], *, cpus: int | None = None
) -> Iterator[Finding]:
    """Compare the cores that this process may use with the ranks, their loader workers and their
    threads.
    """
    cpus = math.floor(min(hardware.cpu_count(), max(1.0, cpu_quota()))) if cpus is None else cpus
    devices, workers = cfg.trainer.devices, OmegaConf.select(cfg, "data.num_workers") or 0
    typed = environ.get("OMP_NUM_THREADS", "")
    ranks = (
        1
        if environ.get("SLURM_STEP_ID") and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
        else devices
    )
    wanted = ranks * (1 + workers)
    slurm = "--cpus-per-task" if "SLURM_JOB_ID" in environ else None
    if cpus < ranks or cpus < wanted // 2:
        yield warning(
            GROUP,
            f"{cpus} cores for {ranks} ranks with {workers} loader workers each: they take turns.",
            remedy=f"Ask for {wanted} cores" + (f" ({slurm}={1 + workers})" if slurm else "")
            + (", or type fewer data.num_workers." if workers else ", or type fewer "
                                                                   "trainer.devices."),
        )  # fmt: skip
    elif typed.isdigit() and int(typed) * ranks > 2 * cpus:
        what = (
            f"OMP_NUM_THREADS={typed} × {ranks} ranks is more than the {cpus} cores: threads "
            "take turns."
        )
        yield warning(GROUP, what, remedy=f"Type export OMP_NUM_THREADS={max(1, cpus // ranks)}.")
    else:
        yield ok(GROUP, f"{cpus} cores for {ranks} rank{'s' * (ranks > 1)}.")
