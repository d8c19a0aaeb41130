"""What may happen to a checkpoint, and to the disk that it is on."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def _shard(checkpoint: Path, stock: bool) -> Path:
    return checkpoint if stock else sorted(checkpoint.glob("*.distcp"))[-1]


def truncate(checkpoint: Path, stock: bool) -> None:
    file = _shard(checkpoint, stock)
    os.truncate(file, file.stat().st_size // 2)


def flip_byte(checkpoint: Path, stock: bool) -> None:
    """Flip one bit in the middle of a file."""
    file = _shard(checkpoint, stock)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x10]))


def remove_shard(checkpoint: Path, stock: bool) -> None:
    _shard(checkpoint, stock).unlink()


def lose_power(checkpoint: Path, stock: bool) -> None:
    """Empty the files that were written last, as a file system may after a loss of power."""
    others = [] if stock else [checkpoint.parent / "last", checkpoint.parents[1] / "summary.json"]
    for file in [checkpoint] if stock else [*checkpoint.iterdir(), *others]:
        os.truncate(file, 0)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    place.mkdir(exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "faults", str(place)],
        check=True,
        capture_output=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, capture_output=True)
