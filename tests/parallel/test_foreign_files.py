"""Weights in files of other programs, and checkpoints whose files hold something else: each is told
as what it is.
"""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from armature.checkpoint import directory, lightning_file, resume, storage
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError

WEIGHTS = {"model.weight": torch.ones(2)}
WHOLE = storage.dumped({"state_dict": WEIGHTS})
FILES = {
    "nothing": (b"", r"it is damaged, or not what torch.save writes. Restore it"),
    "text": (b"junk", r"it is damaged, or not what torch.save writes"),
    "half": (WHOLE[:200], r"it is damaged, or not what torch.save writes"),
    "the weights alone": (WEIGHTS, r"it has no state_dict .*torch.save\("),
    "no weights": ({"state_dict": {}}, r"it has no state_dict with tensors"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_file_without_a_state_dict_is_told_as_what_it_is(content, message, tmp_path):
    file = tmp_path / "x.pt"
    file.write_bytes(content if isinstance(content, bytes) else storage.dumped(content))
    with pytest.raises(ConfigError, match=message) as raised:
        lightning_file.read(file)
    assert "If you trust the file" not in str(raised.value)  # it is no matter of trust


def test_a_pickle_of_another_program_is_refused_without_a_warning(tmp_path):
    file = tmp_path / "x.ckpt"
    file.write_bytes(pickle.dumps({"state_dict": print}))
    with pytest.raises(ConfigError, match=r"x.ckpt: "):  # warnings are errors in tests
        lightning_file.read(file)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "checkpoints" / "step=000001"
    CheckpointWriter().save(path, WEIGHTS, {"global_step": 1}, entries={"step": 1})
    return path


def exchange(file: Path, content: bytes) -> None:
    """Write other content, to which the manifest's checksum fits."""
    file.write_bytes(content)
    own = file.parent / directory.MANIFEST
    manifest = json.loads(own.read_text())
    manifest["files"] |= directory.describe(file.parent, [file.name])
    own.write_text(json.dumps(manifest))


@pytest.mark.parametrize("content", [pickle.dumps({"a": 1}), b"", b"junk"])
def test_an_index_of_tensors_that_is_none_is_named(saved, content):
    exchange(saved / directory.TENSOR_INDEX, content)
    with pytest.raises(ConfigError, match=r"\.metadata: it cannot be read: it is damaged"):
        storage.read_metadata(saved)


def test_a_resume_says_what_the_run_lacks(saved):
    (saved / directory.META).unlink()
    cfg = SimpleNamespace(
        resume=str(saved.parents[1]), checkpoint=SimpleNamespace(root=None, trust=False)
    )
    [problem] = resume.problems(cfg)
    assert "none that is complete" in problem
    assert f"{saved}: meta.pt is missing." in problem
    with pytest.raises(ConfigError, match=r"(?s)meta.pt is missing.*Restore one from a copy"):
        storage.first_intact([saved])


def test_a_failing_disk_is_no_damaged_file_and_leaves_none(tmp_path, monkeypatch):
    def full(file, value):
        file.write_bytes(b"a part")
        raise OSError("No space")

    monkeypatch.setattr(storage, "write_plain", full)
    with pytest.raises(OSError, match="No space"), storage.refusing("x"):
        lightning_file.write(tmp_path / "x.ckpt", {})
    assert not [*tmp_path.iterdir()]
