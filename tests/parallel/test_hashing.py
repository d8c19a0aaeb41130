"""Files are described while they are written, by threads that leave the cores to training until the
save is awaited.
"""

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options

from armature import files
from armature.checkpoint import directory, hashing, state, storage
from armature.checkpoint import writer as checkpoint_writer
from armature.checkpoint.hashing import HashingFileSystem, SaveThreads
from armature.checkpoint.writer import CheckpointWriter

LINUX = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux's scheduler")


def saved(path: Path, **options: Any) -> Path:
    writer = CheckpointWriter(**options)
    writer.save(
        path,
        {"large": torch.randn(3 << 20), "small": torch.ones(2), "none": torch.ones(0)},
        {"global_step": 1},
    )
    writer.finish()
    return path


@pytest.mark.parametrize(
    "options", [{}, {"background": True}, {"background": True, "idle": True}], ids=str
)
def test_nothing_is_read_back_but_the_small_file(tmp_path: Path, monkeypatch, options) -> None:
    read: list[str] = []
    original = files.sha256
    monkeypatch.setattr(files, "sha256", lambda path: read.append(path.name) or original(path))
    path = saved(tmp_path / "step=1", **options)
    assert read == [directory.META]
    described = (directory.read_manifest(path) or {})["files"]
    assert described == directory.describe(path, described)
    assert described.keys() == {directory.META, directory.TENSOR_INDEX, "__0_0.distcp"}


@pytest.mark.parametrize(
    "sizes", [[], [1], [hashing.SMALL - 1, hashing.SMALL], [5, 2 * hashing.PIECE + 3, 7]], ids=str
)
@pytest.mark.parametrize("idle", [False, True])
def test_a_file_is_what_was_written_and_so_is_its_checksum(
    tmp_path: Path, sizes: list[int], idle: bool
) -> None:
    system, pieces = (
        HashingFileSystem(FileSystem(), SaveThreads(idle=idle)),
        [os.urandom(size) for size in sizes],
    )
    with system.create_stream(tmp_path / "a.tmp", "wb") as stream:
        assert [stream.write(memoryview(piece)) for piece in pieces] == sizes
        assert stream.tell() == sum(sizes)
    system.rename(tmp_path / "a.tmp", tmp_path / "a")
    whole = b"".join(pieces)
    assert (tmp_path / "a").read_bytes() == whole
    assert system.written == {
        "a": {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    }


@LINUX
def test_the_work_waits_for_idle_cores_until_somebody_waits_for_it(monkeypatch) -> None:
    def policies(threads: SaveThreads) -> list[int]:
        found: list[int] = []

        def note(piece: memoryview) -> None:
            found.append(os.sched_getscheduler(0))

        threads.both(note, note, [memoryview(b"piece")])
        return found

    ordinary = [os.sched_getscheduler(0)] * 2
    assert policies(SaveThreads()) == ordinary
    threads = SaveThreads(idle=True)
    assert policies(threads) == [os.SCHED_IDLE] * 2
    threads.hurry()
    assert policies(threads) == ordinary
    monkeypatch.setattr(hashing, "IDLE_SECONDS", 0.0)  # on a machine without idle cores
    assert policies(SaveThreads(idle=True)) == ordinary
    assert os.sched_getscheduler(0) == ordinary[0]


def test_the_disk_does_not_wait_for_the_checksum_of_each_piece() -> None:
    written = threading.Event()

    def write(piece: memoryview) -> None:
        if piece == b"last":
            written.set()

    def calculate(piece: memoryview) -> None:
        assert written.wait(20)

    SaveThreads().both(write, calculate, [memoryview(b"first"), memoryview(b"last")])


@LINUX
@pytest.mark.parametrize("waits", ["finish", "wait"])
def test_a_save_that_is_awaited_goes_on_at_once(tmp_path: Path, monkeypatch, waits: str) -> None:
    """The first piece is written on an idle core, where this one asks to wait; the others are
    not.
    """
    begun, awaited, policies = threading.Event(), threading.Event(), []
    hurry = SaveThreads.hurry

    def write(stream: hashing._HashingStream, piece: memoryview) -> None:
        policies.append(os.sched_getscheduler(0))
        begun.set()
        assert awaited.wait(20)
        stream._stream.write(piece)

    def hurry_and_tell(threads: SaveThreads) -> None:
        hurry(threads)
        awaited.set() if begun.is_set() else None

    monkeypatch.setattr(hashing._HashingStream, "_write", write)
    monkeypatch.setattr(SaveThreads, "hurry", hurry_and_tell)
    writer = CheckpointWriter(background=True, idle=True)
    writer.save(tmp_path / "step=1", {"large": torch.randn(3 << 20)}, {})
    assert begun.wait(20)
    getattr(writer, waits)()
    assert policies[0] == os.SCHED_IDLE
    assert len(policies) == 3
    assert os.SCHED_IDLE not in policies[1:]
    assert directory.problem(tmp_path / "step=1") is None


@pytest.mark.parametrize(
    "options", [{}, {"background": True}, {"background": True, "idle": True}], ids=str
)
def test_an_error_of_writing_is_that_of_the_save(tmp_path: Path, monkeypatch, options) -> None:
    def full(stream: hashing._HashingStream, piece: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hashing._HashingStream, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path / "step=1", **options)
    assert not (tmp_path / "step=1").exists()


def test_a_file_shorter_than_what_was_written_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    part = storage.prepare(tmp_path / "step=1", {})
    (part / "__0_0.distcp").write_bytes(b"cut")
    written = {"__0_0.distcp": {"bytes": 5, "sha256": "…"}}
    with pytest.raises(OSError, match=r"__0_0\.distcp has 3 bytes, but 5 were written to it"):
        storage.complete(part, tmp_path / "step=1", {}, written=written)
    assert not (tmp_path / "step=1").exists()


def test_only_the_files_with_a_checksum_go_without_crc32(tmp_path: Path) -> None:
    system, others = HashingFileSystem(FileSystem(), SaveThreads()), []
    with system.create_stream(tmp_path / "a", "wb"):
        assert not get_crc32_options()
        thread = threading.Thread(target=lambda: others.append(get_crc32_options()))
        thread.start()
        thread.join()
    assert get_crc32_options()
    assert others == [True]


def test_a_gpus_tensors_are_copied_into_the_same_pinned_memory_at_each_save(
    tmp_path: Path, monkeypatch
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(checkpoint_writer, "_are_on_gpu", lambda tensors: True)
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda self: pinned.append(self.data_ptr()) or self
    )
    writer = CheckpointWriter(background=True)
    for step, size in ((1, 5), (2, 5), (3, 7)):
        weight = torch.full((size,), float(step))
        writer.save(
            tmp_path / f"step={step}",
            {"weight": weight, "step": torch.tensor(step), "count": step},
            {},
        )
        weight.fill_(-1.0)  # training continues at once
    writer.finish()
    saved = [state.load_full_state_dict(tmp_path / f"step={step}") for step in (1, 2, 3)]
    assert [(len(s["weight"]), float(s["weight"].mean()), int(s["step"])) for s in saved] == [
        (5, 1.0, 1), (5, 2.0, 2), (7, 3.0, 3),
    ]  # fmt: skip
    assert len(pinned) == 2  # one for each form of the tensors
