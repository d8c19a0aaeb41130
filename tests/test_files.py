"""Files that are whole or not there."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from armature import files
from armature.data import cache
from armature.errors import ConfigError
from tests.running import meet_a_full_disk


def test_a_file_that_fails_half_way_is_not_there(tmp_path):
    target = tmp_path / "new" / "a.pt2"
    with pytest.raises(OSError, match="full"), files.replacing(target) as part:  # noqa: PT012
        part.write_text("half")
        raise OSError("full")
    assert list(target.parent.iterdir()) == []
    with files.replacing(target) as part:
        assert part.suffix == ".pt2"
        part.write_text("whole")
    assert [(path.name, path.read_text()) for path in target.parent.iterdir()] == [
        ("a.pt2", "whole")
    ]


def test_only_parts_of_processes_that_are_gone_are_cleared(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    host = socket.gethostname()
    gone_part = tmp_path / f".config.yaml.{host}.{gone.pid}.part"
    kept = [
        tmp_path
        # another start on this machine, which is writing
        / f".config.yaml.{host}.{os.getpid()}.part",
        tmp_path / f".config.yaml.another-{host}.{gone.pid}.part",  # one on another machine
        tmp_path / "step=000002.part",
    ]
    for path in [gone_part, *kept]:
        path.write_text("half")
    gone_folder = tmp_path / f".p.csv.{host}.{gone.pid}.part"
    gone_folder.mkdir()
    (gone_folder / "0.jsonl").touch()
    with files.folder_beside(tmp_path / "p.csv") as folder:
        files.clear_parts(tmp_path)
        assert folder.is_dir()
    files.clear_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_folder_is_looked_at_again_before_another_builds_in_it(tmp_path, monkeypatch):
    """As an NFS client sees it: what another machine has made is missing until its folder is opened
    again.
    """
    folder, real, stale = tmp_path / "cache" / "text-1", Path.exists, {"is": True}
    made = cache.open_or_build(folder, lambda part: {"bytes": (part / "data").write_text("x")})
    monkeypatch.setattr(
        Path, "exists", lambda path: not (stale["is"] and path == folder) and real(path)
    )
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: stale.update({"is": False}) or listed(path))
    assert cache.open_or_build(folder, lambda part: pytest.fail("it was built again")) == made


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("before")
    monkeypatch.setattr(os, "fsync", meet_a_full_disk)
    with pytest.raises(OSError, match="No space left"):
        files.replace(tmp_path / "a", "after")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "before"}


def test_a_cache_on_a_full_disk_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data.source.cache_dir: the disk of .* is full. Make room"
    ):
        cache.open_or_build(tmp_path / "text", meet_a_full_disk)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
