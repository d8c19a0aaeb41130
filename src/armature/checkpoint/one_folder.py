"""Check that all machines write checkpoints into one folder: without it, none of them could be read
again.
"""

from __future__ import annotations

import secrets
import socket
import time
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from armature import files
from armature.checkpoint import directory, resume
from armature.errors import ConfigError
from armature.launcher import environment
from armature.parallel import process_group

WAIT_SECONDS = 90.0  # an NFS client takes what it knows of a folder for true for up to a minute
POLL_SECONDS = 0.5


def require(cfg: DictConfig) -> None:
    """Raise ConfigError if one of several machines does not see what rank 0 writes.

    Called by all ranks.
    """
    key, folder = "run.root", Path(cfg.run.dir)
    if cfg.checkpoint.root:
        key, folder = "checkpoint.root", resume.folder(folder, cfg)
    if environment.world_size() == environment.local_world_size() or not directory.is_local(folder):
        return
    file = folder / process_group.on_rank_0(partial(_create, folder))
    hosts = process_group.on_all_ranks(partial(_host_without, file))
    process_group.on_rank_0(partial(file.unlink, missing_ok=True))
    if (
        found := next(((rank, host) for rank, host in enumerate(hosts) if host is not None), None)
    ) is not None:
        raise ConfigError(
            f"{key}={cfg.checkpoint.root or cfg.run.root}: {folder} on rank {found[0]} "
            f"({found[1]}) is another folder "
            "than on rank 0. Each rank writes its part of a checkpoint there, and none could be "
            "read again. Type a "
            f"{key} on a file system that all machines share."
        )


def _create(folder: Path) -> str:
    """Return the name of a new file, which no machine has looked for yet."""
    name = f".shared.{secrets.token_hex(8)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return name


def _host_without(file: Path) -> str | None:
    """Return this machine's name if it does not see a file, else None."""
    end = time.monotonic() + WAIT_SECONDS
    while not file.exists():
        if time.monotonic() > end:
            return socket.gethostname()
        time.sleep(POLL_SECONDS)
        files.look_again(file.parent)
    return None
