"""The environment variables between a launcher and its ranks.

No other module reads them, and `launcher.slurm` alone writes them, too. Torch-free.

Set by torchrun and by torch's elastic agent; under `srun`, `launcher.slurm` sets the first group
from Slurm's own.

    RANK, WORLD_SIZE               this rank, and the number of ranks on all machines
    LOCAL_RANK, LOCAL_WORLD_SIZE   the same on this machine
    GROUP_RANK                     this machine
    MASTER_ADDR, MASTER_PORT       where the ranks meet
    TORCHELASTIC_RUN_ID            set if an elastic agent started this process
    TORCHELASTIC_RESTART_COUNT     how often that agent has restarted the ranks
    TORCHELASTIC_ERROR_FILE        where a rank leaves its error for the agent
    TORCH_FR_BUFFER_SIZE           how many collectives torch's flight recorder keeps; set by us if
                                   nobody has, as is the next one
    TORCH_GLOO_LAZY_INIT           1: gloo connects two ranks when they first communicate

Set by the process that starts the ranks of this machine (`armature.launch`, `launcher.supervise`):

    ARMATURE_ATTEMPT               how often the ranks have been restarted, each time by a new agent
    ARMATURE_HEARTBEATS            folder in which ranks note their progress for `launcher.watch`
    ARMATURE_STORE                 file in which the ranks of one machine meet; else at
                                   MASTER_ADDR:MASTER_PORT
    ARMATURE_RESIZED               JSON of the settings that follow a smaller number of ranks
                                   (`validation.resize`)
    ARMATURE_DEADLINE              Unix time at which to save and stop, ahead of Slurm's time limit
"""

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from armature import project
from armature.errors import ConfigError

Number = TypeVar("Number", int, float)
RECORDED_COLLECTIVES = "8192"  # of four steps of 80 blocks, under a tensor axis as well
EXPORT_NAME = (
    "Export MASTER_ADDR with the name or the IP address of rank 0's machine (on it, "
    "type hostname -I)."
)
NAME_SECONDS = 60  # until a name that does not resolve counts as wrong
SET_FOR_RANKS = (
    "ARMATURE_ATTEMPT",
    "ARMATURE_HEARTBEATS",
    "ARMATURE_STORE",
    "ARMATURE_RESIZED",
    "ARMATURE_DEADLINE",
)


def is_joined() -> bool:
    """Return True if a launcher started this process as a rank."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def forget_lone_rank() -> None:
    """Remove a RANK without WORLD_SIZE, which is left over from another command.

    Lightning would read it.
    """
    if not is_joined():
        os.environ.pop("RANK", None)


def number(name: str, default: Number) -> Number:
    """Return a variable as a number of the default's type.

    Raises ConfigError if it is none, or is negative.
    """
    value = os.environ.get(name)
    if not value:
        return default
    try:
        found = type(default)(value)
    except ValueError:
        found = None
    if found is None or not 0 <= found < math.inf:
        raise ConfigError(
            f"{name}={value}: must be a number; a launcher sets it. Type unset {name}."
        )
    return found


def rank() -> int:
    return number("RANK", 0)


def is_first(*names: str) -> bool:
    """Return False in all processes but one, by the first of these variables that is set; True if
    it is no number.

    For what is reported before the ranks have met, also about these variables themselves.
    """
    value = next((os.environ[name] for name in names if os.environ.get(name)), "0")
    return not value.isdecimal() or int(value) == 0


def world_size() -> int:
    return number("WORLD_SIZE", 1) if is_joined() else 1


def local_rank() -> int:
    return number("LOCAL_RANK", 0)


def local_world_size() -> int:
    return number("LOCAL_WORLD_SIZE", 1)


def node_rank() -> int:
    return number("GROUP_RANK", 0)


def main_address() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def wait_for_main_address(*, seconds: float = NAME_SECONDS) -> None:
    """Return when the name MASTER_ADDR resolves: a cluster may know it some seconds after the
    processes start.

    Raises:
        ConfigError: it does not within `seconds`. torch would try for many minutes without a word.
    """
    what = f"MASTER_ADDR={main_address()}: this machine cannot resolve the name"
    _retry(lambda: socket.getaddrinfo(main_address(), None), what, EXPORT_NAME, seconds=seconds)


def wait_for_endpoint(endpoint: str, *, seconds: float) -> None:
    """Return when HOST:PORT answers, or is on this machine.

    Raises:
        ConfigError: it does not within `seconds`. torch would try for a minute or two, in which no
            signal ends this process.
    """
    address, _, port = endpoint.rpartition(":")
    host = address.strip("[]")  # of IPv6

    def reach() -> None:
        family = socket.getaddrinfo(host or None, 0)[0][0]
        try:
            socket.create_server((host, 0), family=family).close()  # of this machine, else it fails
        except OSError:
            socket.create_connection((host, int(port)), timeout=5).close()

    remedy = "Type the same command on that machine, too, or correct the address."
    what = f"launch.rdzv_endpoint={endpoint} does not answer"
    _retry(reach, what, remedy, seconds=seconds)


def _retry(attempt: Callable[[], object], what: str, remedy: str, *, seconds: float) -> None:
    """Call this until it succeeds, or raise ConfigError after `seconds`. Tell the first failure."""
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            attempt()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{what} ({error}). {remedy}") from None
            if not told:
                print(f"{what} ({error}). Waiting up to {seconds} s.", file=sys.stderr)
            told = True
        time.sleep(1)


def main_port() -> int:
    return number("MASTER_PORT", 29500)


def is_under_mpirun() -> bool:
    return any(number(name, 1) > 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


def is_under_agent() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_restarted() -> bool:
    return any(number(name, 0) > 0 for name in ("ARMATURE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))


def prepare_collectives() -> None:
    """Let torch remember this process's last collectives, for the report about a hang, and gloo
    connect only ranks that communicate: each to each other are N² addresses in the store.

    Call it before the process group is made.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    raise_open_files()


def raise_open_files() -> None:
    """Let this process and its children open as many files as the system permits.

    The connections of all ranks to the store end in one process.
    """
    if sys.platform == "linux":
        own = psutil.Process()
        hard = own.rlimit(psutil.RLIMIT_NOFILE)[1]
        own.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))


def share_sources() -> None:
    """Let processes that a launcher of Hydra's starts elsewhere (joblib, submitit) import what is
    in src/.
    """
    known = os.environ.get("PYTHONPATH")
    if project.IMPORTED[0] not in (known or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*project.IMPORTED, known]))


def of_lone_process() -> dict[str, str]:
    """Return the environment without what makes a process a rank, such as a task of `srun`."""
    of_ranks = ("SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "TORCHELASTIC_")
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", *SET_FOR_RANKS)
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(of_ranks) and name not in named
    }


def _path(name: str) -> Path | None:
    return Path(value) if (value := os.environ.get(name)) else None


def error_file() -> Path | None:
    return _path("TORCHELASTIC_ERROR_FILE")


def rank_variables(*, attempt: int, heartbeats: Path, store: Path | None) -> dict[str, str]:
    """Return what the ranks of an attempt need; `store` is None for ranks on several machines."""
    return {
        "ARMATURE_ATTEMPT": str(attempt),
        "ARMATURE_HEARTBEATS": str(heartbeats),
        **({"ARMATURE_STORE": str(store)} if store is not None else {}),
    }


def store_file() -> Path | None:
    return _path("ARMATURE_STORE")


def heartbeat_folder() -> Path | None:
    return _path("ARMATURE_HEARTBEATS")


def watched_rank(environ: Mapping[str, str], *, heartbeats: Path) -> int | None:
    """Return the rank of the process with this environment, or None if it is no rank with that
    heartbeat folder.
    """
    watched = environ.get("ARMATURE_HEARTBEATS") == str(heartbeats) and "RANK" in environ
    return int(environ["RANK"]) if watched else None


def resized_settings() -> str:
    return os.environ.get("ARMATURE_RESIZED", "")


def set_deadline(unix_time: float) -> None:
    os.environ["ARMATURE_DEADLINE"] = str(unix_time)


def deadline() -> float | None:
    value = number("ARMATURE_DEADLINE", math.nan)
    return None if math.isnan(value) else value
