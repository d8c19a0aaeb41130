"""The run directory and the folder of checkpoints: writable, atomic renames, room for checkpoints.

Torch-free.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from omegaconf import DictConfig

from armature import files
from armature.checkpoint import resume
from armature.doctor.finding import Finding, failure, ok, warning
from armature.errors import ConfigError, error_line, masked
from armature.launcher import lock

GROUP = "run directory"
SLOW_SECONDS = 2.0  # of a small durable write
STORE_SECONDS = 60.0  # for a small file in an object store, whose client may try again for minutes
ADAM_STATES = 2  # tensors of a parameter's size in a checkpoint, besides the weights
GiB = 2**30


def check(cfg: DictConfig) -> list[Finding]:
    """Return the findings about run.root and checkpoint.root."""
    folders = {"run.root": cfg.run.root, "checkpoint.root": cfg.checkpoint.root}
    written = [writable(root, key=key) for key, root in folders.items() if root is not None]
    return [*in_use(cfg), *chain(*written)]


def in_use(cfg: DictConfig) -> Iterator[Finding]:
    """Find another run that holds the run directory; one without run.name gets a new directory."""
    if cfg.run.name is None:
        return
    named = cfg.copy()
    named.run.dir = str(Path(cfg.run.root) / cfg.run.name)
    try:
        lock.check(named)
    except ConfigError as error:
        remedy = "Type another run.name, or wait for the end of that run."
        yield failure(GROUP, str(error), remedy=remedy)


def writable(root: str, *, key: str) -> Iterable[Finding]:
    """Write a file, read it and rename it over another, as saving does."""
    done: list[Finding] = []
    act = _in_store if "://" in root else _in_folder

    def rehearse() -> None:
        started = time.monotonic()
        try:
            act(root)
        except Exception as error:  # each client of a store has classes of its own
            what = f"{key}={root}: it cannot be written ({masked(error_line(error))})."
            done.append(failure(GROUP, what, remedy=f"Make room there, or type another {key}."))
        else:
            seconds = time.monotonic() - started
            what = f"{key}={root} can be written; a small file took {seconds:.1f} s."
            slow = seconds > SLOW_SECONDS
            remedy = f"Type a {key} on a faster file system, or checkpoint.background=true."
            done.append(warning(GROUP, what, remedy=remedy) if slow else ok(GROUP, what))

    thread = threading.Thread(target=rehearse, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    late = f"{key}={root}: no file could be written within {STORE_SECONDS:g} s."
    remedy = "Check the address, the credentials and the network."
    return done or [failure(GROUP, late, remedy=remedy)]


def _in_store(root: str) -> None:
    file = resume.to_path(f"{root.rstrip('/')}/.doctor-{os.getpid()}-{time.monotonic_ns()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"new")
    file.read_bytes()
    file.unlink()


def _in_folder(root: str) -> None:
    # beside it, if it does not exist: nothing is left behind
    here = files.nearest_existing(Path(root))
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=here) as name:
        file, large = Path(name) / "file", "new" * 2**16  # as a small shard: a full disk shows
        files.replace(file, "old")
        with file.open() as opened:
            files.replace(file, large)
            if opened.read() not in ("old", "") or file.read_text() != large:
                raise OSError("a rename is not atomic, so a killed save could leave a part")


def free_bytes(cfg: DictConfig) -> int | None:
    """Return the free space where checkpoints are written, or None for an object store."""
    root = cfg.checkpoint.root or cfg.run.root
    return None if "://" in root else shutil.disk_usage(files.nearest_existing(Path(root))).free


def room(cfg: DictConfig, *, free: int, trained: int, frozen_bytes: int = 0) -> Finding:
    """Compare the free space with the checkpoints that the configuration keeps, and the one that
    is being written.

    Args:
        trained: parameters that are trained.
        frozen_bytes: of other weights that checkpoints hold.
    """
    every, steps = cfg.checkpoint.keep_every_n_steps, cfg.trainer.max_steps
    count = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1
    count += steps // every if every and steps else 0
    each = trained * 4 * (1 + ADAM_STATES) + frozen_bytes
    what = (
        f"{count} checkpoints of about {_size(each)} (weights and AdamW's state) need "
        f"{_size(each * count)}; {_size(free)} are free."
    )
    key = "run.root" if cfg.checkpoint.root is None else "checkpoint.root"
    remedy = f"Free space, type another {key}, or a smaller checkpoint.keep_last or keep_best."
    if free < each:
        return failure(GROUP, what, remedy=remedy)
    return warning(GROUP, what, remedy=remedy) if free < each * count else ok(GROUP, what)


def _size(count: int) -> str:
    return f"{count / GiB:.1f} GiB" if count >= GiB else f"{count / 2**20:.1f} MiB"
