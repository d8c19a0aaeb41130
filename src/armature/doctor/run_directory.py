"""The run directory and the folder of checkpoints: writable, atomic renames, room for checkpoints.

Torch-free.
"""

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from armature import files
from armature.checkpoint import resume
from armature.doctor import finding
from armature.doctor.finding import Finding, failure, ok, warning
from armature.errors import ConfigError, error_line, masked
from armature.launcher import lock

GROUP = "run directory"
SLOW_SECONDS = 2.0  # of a small durable write
STORE_SECONDS = 60.0  # for a small file in an object store
ADAM_STATES = 2  # tensors of a parameter's size in a checkpoint, besides the weights
GiB = 2**30


class _NotAtomic(Exception):
    """The file system did something else than POSIX demands of a rename."""


def check(cfg: DictConfig) -> list[Finding]:
    """Return the findings about run.root and checkpoint.root."""
    checkpoints = cfg.checkpoint.root
    checks: list[Callable[[], Iterable[Finding]]] = [
        partial(in_use, cfg),
        partial(folder, Path(cfg.run.root), key="run.root"),
    ]
    if checkpoints is not None:
        checks.append(
            partial(store, checkpoints) if "://" in checkpoints else
            partial(folder, Path(checkpoints), key="checkpoint.root")
        )  # fmt: skip
    return finding.gathered(GROUP, *checks)


def store(root: str) -> list[Finding]:
    """Write a file into an object store, read and remove it.

    In a thread: a client may try again for minutes.
    """
    done: list[Finding] = []

    def rehearse() -> None:
        name = f".doctor-{os.getpid()}-{time.monotonic_ns()}"
        try:
            file = resume.to_path(f"{root.rstrip('/')}/{name}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"new")
            if file.read_bytes() != b"new":
                raise OSError("a file that was written reads as something else")
            file.unlink()
        except Exception as error:  # each client has classes of its own
            why, remedy = (
                masked(error_line(error)),
                "Check the address, the credentials and the network.",
            )
            done.append(
                failure(
                    GROUP, f"checkpoint.root={root}: it cannot be written ({why}).", remedy=remedy
                )
            )
        else:
            done.append(
                ok(
                    GROUP,
                    f"checkpoint.root={root} can be written; how much room it has is not known.",
                )
            )

    thread = threading.Thread(target=rehearse, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    late = failure(
        GROUP, f"checkpoint.root={root}: no file could be written within {STORE_SECONDS:g} s.",
        remedy="Check the address, the credentials and the network.",
    )  # fmt: skip
    return done or [late]


def in_use(cfg: DictConfig) -> Iterator[Finding]:
    """Find another run that holds the run directory; one without run.name gets a new directory."""
    if cfg.run.name is None:
        return
    named = cfg.copy()
    named.run.dir = str(Path(cfg.run.root) / cfg.run.name)
    try:
        lock.check(named)
    except ConfigError as error:
        yield failure(
            GROUP, str(error), remedy="Type another run.name, or wait for the end of that run."
        )


def folder(path: Path, *, key: str) -> list[Finding]:
    """Write a file, rename it over another and rename a folder, as saving does."""
    here = files.nearest_existing(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        work = path / f".doctor-{os.getpid()}-{time.monotonic_ns()}"
        work.mkdir()
    except OSError as error:
        return [_unusable(path, error, key=key)]
    try:
        seconds = _rehearse(work)
    except OSError as error:
        return [_unusable(path, error, key=key)]
    except _NotAtomic as error:
        return [
            failure(
                GROUP,
                f"{key}={path}: {error}, so a killed save could leave a damaged checkpoint.",
                remedy=f"Type another {key}, on a file system that renames atomically.",
            )
        ]
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _remove_empty(path, until=here)
    if seconds > SLOW_SECONDS:
        what = f"{key}={path}: a small file took {seconds:.1f} s to write."
        return [
            warning(
                GROUP,
                what,
                remedy=f"Type a {key} on a faster file system, or checkpoint.background=true.",
            )
        ]
    return [ok(GROUP, f"{key}={path} can be written, and renames are atomic.")]


def _rehearse(work: Path) -> float:
    started = time.monotonic()
    new, final = work / "new", work / "final"
    final.write_bytes(b"old")
    with new.open("wb") as file:
        file.write(b"new" * 2**16)  # as large as a small shard, so that a full disk shows
        file.flush()
        os.fsync(file.fileno())
    opened = final.open("rb")
    os.replace(new, final)
    with opened:
        if opened.read() not in (b"old", b""):
            raise _NotAtomic("a rename changes what an open file reads")
    if final.stat().st_size != 3 * 2**16 or new.exists():
        raise _NotAtomic("a rename over a file did not replace it")
    (work / "step.part").mkdir()
    (work / "step.part" / "shard").touch()
    os.rename(work / "step.part", work / "step")
    if not (work / "step" / "shard").exists():
        raise _NotAtomic("a folder could not be renamed")
    return time.monotonic() - started


def _unusable(path: Path, error: OSError, *, key: str) -> Finding:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    why = "its disk or your quota is full" if full else f"it cannot be written ({error.strerror})"
    remedy = (
        f"Delete old runs (du -sh {path}/*), or type another {key}."
        if full
        else f"Type another {key}."
    )
    return failure(GROUP, f"{key}={path}: {why}.", remedy=remedy)


def _remove_empty(path: Path, *, until: Path) -> None:
    path = path.absolute()
    while path != until:
        try:
            path.rmdir()
        except OSError:
            return
        path = path.parent


def checkpoint_bytes(trained: int, frozen_bytes: int) -> int:
    """Return the size of a checkpoint: trained weights in fp32 with AdamW's two tensors of their
    size, and others.
    """
    return trained * 4 * (1 + ADAM_STATES) + frozen_bytes


def kept_checkpoints(cfg: DictConfig) -> int:
    """Return how many checkpoints the configuration keeps at most, and one more while it is
    written.
    """
    kept = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best
    if (every := cfg.checkpoint.keep_every_n_steps) and cfg.trainer.max_steps:
        kept += math.floor(cfg.trainer.max_steps / every)
    return kept + 1


def free_bytes(cfg: DictConfig) -> int | None:
    """Return the free space where checkpoints are written, or None for an object store."""
    root = cfg.checkpoint.root or cfg.run.root
    return None if "://" in root else shutil.disk_usage(files.nearest_existing(Path(root))).free


def room(cfg: DictConfig, *, free: int, trained: int, frozen_bytes: int = 0) -> Iterator[Finding]:
    """Compare the free space with the checkpoints that the configuration keeps.

    Args:
        trained: parameters that are trained.
        frozen_bytes: of other weights that checkpoints hold.
    """
    key = "run.root" if cfg.checkpoint.root is None else "checkpoint.root"
    each, count = checkpoint_bytes(trained, frozen_bytes), kept_checkpoints(cfg)
    others = f", and {_size(frozen_bytes)} of others" if frozen_bytes else ""
    what = (
        f"{count} checkpoints of about {_size(each)} ({trained:,} trained parameters with AdamW's "
        f"state{others}) need "
        f"{_size(each * count)}; {_size(free)} are free"
    )
    remedy = (
        f"Free space, type another {key}, or fewer checkpoint.keep_last, keep_best or "
        "keep_every_n_steps."
    )
    if free < each:
        yield failure(GROUP, f"{what}: not even one fits.", remedy=remedy)
    elif free < each * count:
        yield warning(GROUP, f"{what}.", remedy=remedy)
    else:
        yield ok(GROUP, f"{what}.")


def _size(count: int) -> str:
    return f"{count / GiB:.1f} GiB" if count >= GiB else f"{count / 2**20:.1f} MiB"
