"""Files are described while they are written."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options

from armature.checkpoint import directory, state
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


@pytest.mark.parametrize("background", [False, True])
def test_checksums_are_those_of_the_files(tmp_path, background):
    path = saved(tmp_path / "step=1", background=background)
    files = (directory.read_manifest(path) or {})["files"]
    assert files.keys() == {"meta.pt", ".metadata", "__0_0.distcp"}
    assert directory.checksum_problem(path) is None
    assert get_crc32_options()  # only left out while files are written


@pytest.mark.parametrize("options", [{}, {"background": True}], ids=str)
def test_an_error_of_writing_is_that_of_the_save(tmp_path, monkeypatch, options):
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


def test_a_file_shorter_than_what_was_written_is_no_part_of_a_checkpoint(tmp_path, monkeypatch):
    """As if another machine had written it to a disk of its own."""
    describe = directory.describe

    def cut(part: Path, names: list[str]) -> Any:
        (part / "__0_0.distcp").write_bytes(b"cut")
        return describe(part, names)

    monkeypatch.setattr(directory, "describe", cut)
    with pytest.raises(OSError, match=r"__0_0\.distcp has 3 bytes.* All machines must share this"):
        saved(tmp_path / "step=1")
    assert not (tmp_path / "step=1").exists()


def test_a_gpus_tensors_are_copied_into_the_same_pinned_memory_at_each_save(tmp_path, monkeypatch):
    pinned: list[int] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
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
