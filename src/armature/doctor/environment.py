"""This machine: packages, GPUs, memory, shared memory, cores, and what another launcher has left.
Torch-free.
"""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from packaging.requirements import Requirement

from armature import hardware
from armature.doctor.finding import Finding, failure, ok, warning
from armature.launcher import environment

GROUP = "environment"
REQUIREMENTS = Path(__file__).parents[3] / "requirements.txt"
GiB = 2**30
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
# bytes: NCCL's buffers between the ranks of a machine, and batches of loader workers
SHM_PER_RANK = GiB // 4
# bytes: a rank's imports take 0.7 GiB, a small model and its data the rest
MEMORY_PER_RANK, MEMORY_PER_WORKER = 2 * GiB, GiB // 4


def check(cfg: DictConfig) -> list[Finding]:
    """Return the findings about this machine."""
    found = [*versions(), *gpus(cfg), *shared_memory(cfg), *memory(cfg), *cores(cfg)]
    return [each._replace(where=socket.gethostname()) for each in found]


def versions() -> Iterator[Finding]:
    """Compare the installed packages with requirements.txt, if this is a clone."""
    lines = REQUIREMENTS.read_text().splitlines() if REQUIREMENTS.is_file() else []
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    required = [each for each in found if each.marker is None or each.marker.evaluate()]
    wrong = False
    for each in required:
        version = None
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(each.name)
        if version is None or not each.specifier.contains(version, prereleases=True):
            wrong = True
            what = f"This project needs {each}, and {version or 'no version'} is installed."
            yield failure(GROUP, what, remedy=f"Type pip install '{each}'.")
    if required and not wrong:
        yield ok(GROUP, f"All {len(required)} required packages have versions that go together.")


def gpus(cfg: DictConfig) -> Iterator[Finding]:
    """Find a GPU that the driver does not show, and a torch that was built without CUDA."""
    count, torch_version = hardware.gpu_count(), metadata.version("torch")
    has_card = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if cfg.trainer.accelerator == "gpu" and "+cpu" in torch_version:
        what = f"torch {torch_version} was built without CUDA, but trainer.accelerator=gpu."
        remedy = "Type pip install --force-reinstall torch, from PyTorch's index for your CUDA."
        yield failure(GROUP, what, remedy=remedy)
    elif cfg.trainer.accelerator == "gpu":
        yield ok(GROUP, f"{count} GPUs are visible.")
    elif has_card and not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        what = f"This machine seems to have GPUs, but the driver shows none{hidden}."
        remedy = "Type nvidia-smi; if it fails, the driver must be installed or reloaded."
        yield warning(GROUP, what, remedy=remedy)


def shared_memory(cfg: DictConfig, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Check the room in /dev/shm, which loader workers and NCCL need; a container has 64 MiB by
    default.
    """
    if folder.is_dir() and (_workers(cfg) or cfg.trainer.accelerator == "gpu"):
        free, needed = shutil.disk_usage(folder).free, SHM_PER_RANK * cfg.trainer.devices
        what = f"{folder} has {free / GiB:.2f} GiB free; {needed / GiB:.2f} GiB are needed."
        remedy = "In Docker type --shm-size=16g or --ipc=host; else remove old files from it."
        yield judged(free >= needed, what, remedy=remedy)


def memory(cfg: DictConfig) -> Iterator[Finding]:
    """Compare the memory of the machine or the container with what its ranks need at least."""
    limit = hardware.ram_bytes()
    needed = cfg.trainer.devices * (MEMORY_PER_RANK + _workers(cfg) * MEMORY_PER_WORKER)
    what = f"Memory: {limit / GiB:.1f} GiB; ranks and loader workers need {needed / GiB:.1f}."
    remedy = "Ask for more (Slurm: --mem=0; Docker: --memory), or type fewer data.num_workers."
    yield judged(limit >= needed, what, remedy=remedy)


def cores(cfg: DictConfig) -> Iterator[Finding]:
    """Compare the cores that this process may use with the ranks and their loader workers."""
    cpus, ranks, workers = hardware.cpu_count(), cfg.trainer.devices, _workers(cfg)
    if "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        ranks = 1  # each task has cores of its own
    what = f"Cores: {cpus}; ranks: {ranks}, with {workers} loader workers each."
    remedy = f"They take turns: ask for {ranks * (1 + workers)} cores, or fewer data.num_workers."
    yield judged(cpus >= max(ranks, ranks * (1 + workers) // 2), what, remedy=remedy)


def judged(enough: bool, what: str, *, remedy: str) -> Finding:
    return ok(GROUP, what) if enough else warning(GROUP, what, remedy=remedy)


def leftovers(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Find variables of ranks that no launcher of this process has set: the shell kept them from
    another job.
    """
    present = [name for name in OF_RANKS if environ.get(name)]
    if present and not any(name in environ for name in LAUNCHERS):
        known = ", ".join(f"{name}={environ[name]}" for name in present)
        what = f"{known}: set, but neither torchrun nor srun started this process."
        remedy = f"If they are left from another job, type unset {' '.join(present)}"
        yield warning("launch", what, remedy=remedy)
    else:
        yield ok("launch", "No variables are left from another job.")


def _workers(cfg: DictConfig) -> int:
    return OmegaConf.select(cfg, "data.num_workers") or 0
