"""Machines that do not share the folder of checkpoints are refused, and no such checkpoint is
called complete.
"""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from armature.checkpoint import directory, one_folder, storage
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError
from armature.parallel import process_group


def config(tmp_path: Path, root: str | None = None):
    run = {"dir": str(tmp_path / "outputs" / "a"), "root": str(tmp_path / "outputs"), "name": "a"}
    return OmegaConf.create({"run": run, "checkpoint": {"root": root}})


@pytest.fixture
def two_machines(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(one_folder, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(one_folder, "POLL_SECONDS", 0.01)


@pytest.mark.parametrize("root", [None, "mine"])
def test_another_disk_under_the_same_path_is_refused_by_name(
    tmp_path, monkeypatch, two_machines, root
):
    cfg = config(tmp_path, root and str(tmp_path / root))

    def on_rank_1(work):  # whose disk does not have the file
        for file in tmp_path.rglob(".shared.*"):
            file.unlink()
        return [None, work()]

    monkeypatch.setattr(process_group, "on_all_ranks", on_rank_1)
    monkeypatch.setattr(process_group, "on_rank_0", lambda work: work())
    key = "checkpoint.root" if root else "run.root"
    with pytest.raises(
        ConfigError, match=rf"{key}={tmp_path}.* on rank 1 \(.*\) is another folder .* Type a {key}"
    ):
        one_folder.require(cfg)


def test_a_shared_folder_is_left_as_it_was(tmp_path, two_machines):
    one_folder.require(config(tmp_path))
    assert list((tmp_path / "outputs" / "a").iterdir()) == []
    one_folder.require(config(tmp_path, "memory://store"))  # all machines see one store


def test_one_machine_is_not_asked(tmp_path):
    one_folder.require(config(tmp_path))
    assert not (tmp_path / "outputs").exists()


def test_a_checkpoint_without_another_machines_file_is_not_published(tmp_path):
    CheckpointWriter().save(tmp_path / "step=000001", {"weight": torch.ones(2)}, {})
    part = storage.prepare(tmp_path / "step=000002", {})
    elsewhere = {"__1_0.distcp": {"bytes": 10, "sha256": "…"}}
    everyones = [elsewhere, directory.describe(part, ["meta.pt"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "on_all_ranks", lambda work, group=None: everyones)
        patch.setattr(process_group, "on_rank_0", lambda work, group=None: work())
        with pytest.raises(
            OSError, match=r"__1_0\.distcp is missing, as rank 0 sees it. All machines must share"
        ):
            storage.complete(part, tmp_path / "step=000002", {}, written={})
    assert list(directory.checkpoints_in(tmp_path)) == [1]


def test_a_machine_that_sees_no_manifest_does_not_call_the_files_intact(tmp_path):
    (tmp_path / "step=000001").mkdir()
    assert (
        directory.checksum_problem(tmp_path / "step=000001", share=(1, 2))
        == "it holds no readable manifest.json"
    )
