"""Files are described while they are written."""

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options

from armature.checkpoint import state, storage
from armature.checkpoint import writer as checkpoint_writer
from armature.checkpoint.hashing import HashingFileSystem
from armature.checkpoint.writer import CheckpointWriter


def saved(path: Path, **options: Any) -> Path:
    writer = CheckpointWriter(**options)
    writer.save(
        path,
        {"large": torch.randn(3 << 20), "small": torch.ones(2), "none": torch.ones(0)},
        {"global_step": 1},
    )
    writer.finish()
    return path


@pytest.mark.parametrize("sizes", [[], [1], [5, 4 << 20, 7]], ids=str)
def test_a_file_is_what_was_written_and_so_is_its_checksum(
    tmp_path: Path, sizes: list[int]
) -> None:
    system, pieces = HashingFileSystem(FileSystem()), [os.urandom(size) for size in sizes]
    with system.create_stream(tmp_path / "a.tmp", "wb") as stream:
        assert [stream.write(memoryview(piece)) for piece in pieces] == sizes
        assert stream.tell() == sum(sizes)
    system.rename(tmp_path / "a.tmp", tmp_path / "a")
    whole = b"".join(pieces)
    assert (tmp_path / "a").read_bytes() == whole
    assert system.written == {
        "a": {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    }


@pytest.mark.parametrize("options", [{}, {"background": True}], ids=str)
def test_an_error_of_writing_is_that_of_the_save(tmp_path: Path, monkeypatch, options) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    @contextmanager
    def create_stream(*args: Any) -> Iterator[Any]:
        yield Full()

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
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
    system, others = HashingFileSystem(FileSystem()), []
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
