"""What a checkpoint is told by, and what is not loaded."""

import io
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from armature.checkpoint import convert, directory, resume, storage
from armature.checkpoint import state as checkpoint
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError

RAN: list[str] = []


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return RAN.append, ("ran",)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two complete checkpoints, of steps 1 and 2; the later one is given."""
    for step in (1, 2):
        tensors = {"weight": torch.full((64,), float(step)), "count": step}
        CheckpointWriter().save(
            tmp_path / f"step=00000{step}", tensors, {"global_step": step}, entries={"step": step}
        )
    return tmp_path / "step=000002"


def shard(path: Path) -> Path:
    return next(path.glob("__*"))


def truncate(path: Path) -> str:
    file = shard(path)
    file.write_bytes(file.read_bytes()[:-10])
    return "__0_0.distcp has"


def flip(path: Path) -> str:
    file = shard(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    return "__0_0.distcp was changed"


def lose(path: Path) -> str:
    shard(path).unlink()
    return "__0_0.distcp is missing"


def lose_manifest(path: Path) -> str:
    (path / directory.MANIFEST).unlink()
    return "no readable manifest.json"


def spoil_manifest(path: Path) -> str:
    (path / directory.MANIFEST).write_text("{")
    return "no readable manifest.json"


def alter_meta(path: Path) -> str:
    torch.save({"global_step": 9}, path / "meta.pt")
    return "meta.pt"


DAMAGES = [
    truncate, flip, lose, lose_manifest, spoil_manifest, alter_meta,
]  # fmt: skip


@pytest.mark.guarantee
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_skipped(saved, damage, caplog):
    said = damage(saved)
    found = storage.first_intact(resume.candidates(saved.parent))
    assert found == saved.parent / "step=000001"
    assert "step=000002 is skipped" in caplog.text
    assert said in caplog.text


@pytest.mark.guarantee
def test_the_pointer_comes_first_then_the_newest(saved):
    names = [path.name for path in resume.candidates(saved.parent)]
    assert names == ["step=000002", "step=000001"]
    (saved.parent / "last").write_text("step=000001\n")
    assert [path.name for path in resume.candidates(saved.parent)] == ["step=000001", "step=000002"]
    (saved.parent / "last").write_text("step=000099\n")  # gone: not a reason to start from scratch
    assert [path.name for path in resume.candidates(saved.parent)] == names


@pytest.mark.guarantee
def test_what_a_crash_leaves_is_cleared_and_never_picked_up(saved):
    shutil.copytree(saved, saved.with_name("step=000003.part"))
    saved.rename(
        saved.with_name("step=000002.old")
    )  # killed between the two renames of a replacement
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (saved.parent / f".last.{socket.gethostname()}.{gone.pid}.part").write_text("step=0000")
    assert [path.name for path in resume.candidates(saved.parent)] == ["step=000001"]
    directory.clear_leftovers(saved.parent)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step=000001", "step=000002"]


def test_of_a_linked_checkpoint_only_the_link_is_removed(saved, tmp_path):
    archived = tmp_path / "archive"
    saved.rename(archived)
    saved.symlink_to(archived, target_is_directory=True)
    assert directory.prune(saved.parent, keep={1}) == [2]
    assert not saved.is_symlink()
    assert directory.problem(archived) is None
    assert directory.checksum_problem(archived) is None


def test_a_broken_file_of_weights_is_named(tmp_path):
    for content in (b"", b"{", b"\x08" + bytes(7) + b"not json"):
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.safetensors: it cannot be read as safetensors"):
            convert.from_file(tmp_path / "a.safetensors", tmp_path / "step=000000")


def test_a_foreign_directory_is_taken_only_on_trust(saved):
    lose_manifest(saved)
    with pytest.raises(ConfigError, match="not written by this program"):
        storage.first_intact([saved])
    assert storage.first_intact([saved], trust=True) == saved


def rewrite(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.guarantee
def test_code_in_meta_does_not_run(saved):
    torch.save({"global_step": Code()}, saved / "meta.pt")
    with pytest.raises(ConfigError, match="refused, since it holds more than tensors"):
        storage.read_meta(saved)
    assert RAN == []


def test_what_a_newer_torch_says_of_a_tensor_is_left_out(saved, monkeypatch):
    metadata, state = storage.read_metadata(saved), TensorProperties.__getstate__
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda self: (*state(self), (1,)))
        rewrite(saved, metadata)
    assert checkpoint.load_full_state_dict(saved)["weight"].tolist() == [2.0] * 64


class Reached:
    """What pickle makes of a member of an enumeration before Python 3.11.4."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return getattr, (_MEM_FORMAT_ENCODING, self.name)


def test_metadata_that_an_earlier_python_wrote_are_read(saved):
    metadata = storage.read_metadata(saved)
    metadata.planner_data = Reached("TORCH_CONTIGUOUS_FORMAT")
    rewrite(saved, metadata)
    found = storage.read_metadata(saved).planner_data
    assert found is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    metadata.planner_data = Reached("__class__")
    rewrite(saved, metadata)
    with pytest.raises(ConfigError, match="getattr"):
        storage.read_metadata(saved)


@pytest.mark.guarantee
def test_code_in_metadata_does_not_run(saved):
    metadata = storage.read_metadata(saved)
    metadata.planner_data = Code()
    rewrite(saved, metadata)
    with pytest.raises(ConfigError, match="refused, since it holds more than tensors"):
        checkpoint.load_full_state_dict(saved)
    assert RAN == []


@pytest.mark.guarantee
def test_code_in_a_value_does_not_run(saved):
    metadata, file = storage.read_metadata(saved), shard(saved)
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "count")
    code = io.BytesIO()
    torch.save(Code(), code)
    place.offset, place.length = file.stat().st_size, len(code.getvalue())
    with file.open("ab") as stream:
        stream.write(code.getvalue())
    rewrite(saved, metadata)
    with pytest.raises(ConfigError, match="count: refused"):
        checkpoint.load_full_state_dict(saved)
    assert RAN == []


def test_a_ckpt_of_lightnings_gives_its_weights(tmp_path):
    torch.save({"state_dict": {"model.weight": torch.ones(2)}, "epoch": 3}, tmp_path / "a.ckpt")
    assert convert.from_file(tmp_path / "a.ckpt", tmp_path / "step=000000") == ["model.weight"]
    assert checkpoint.load_full_state_dict(tmp_path / "step=000000")["model.weight"].tolist() == [
        1,
        1,
    ]
    assert checkpoint.is_weights_only(tmp_path / "step=000000")


@pytest.mark.guarantee
def test_code_in_a_ckpt_does_not_run(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": Code()}, tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=r"a.ckpt: refused"):
        convert.from_file(tmp_path / "a.ckpt", tmp_path / "step=000000")
    assert RAN == []


def test_a_machine_that_sees_no_manifest_does_not_call_the_files_intact(tmp_path):
    (tmp_path / "step=000001").mkdir()
    assert (
        directory.checksum_problem(tmp_path / "step=000001", share=(1, 2))
        == "it holds no readable manifest.json"
    )
