"""What ranks see of a file system that shows them different files, or keeps an older listing."""

import pytest
from omegaconf import OmegaConf

from armature import worker
from armature.checkpoint import directory, storage
from armature.errors import ConfigError
from armature.parallel import process_group


def test_all_ranks_resume_from_what_rank_0_sees(tmp_path, monkeypatch):
    cfg = OmegaConf.create(
        {
            "resume": "auto",
            "run": {"dir": str(tmp_path), "name": "a"},
            "checkpoint": {"root": None, "trust": False},
        }
    )
    assert worker._checkpoint_to_resume(cfg, tmp_path) is None
    seen = tmp_path / "checkpoints" / "step=000002"  # not yet, on this machine
    monkeypatch.setattr(process_group, "on_rank_0", lambda work: [seen])
    monkeypatch.setattr(storage, "first_intact", lambda paths, trust: paths[0])
    assert worker._checkpoint_to_resume(cfg, tmp_path) == seen
    monkeypatch.setattr(process_group, "on_rank_0", lambda work: ConfigError("none is complete"))
    with pytest.raises(ConfigError, match="none is complete"):
        worker._checkpoint_to_resume(cfg, tmp_path)


def test_listings_of_a_store_are_asked_for_anew(monkeypatch):
    folder = pytest.importorskip("upath").UPath("memory://listed/run")
    kept, known, own = type(folder.fs), {}, []  # as s3fs keeps listings
    ls = kept.ls

    def cached(self, path, **kwargs):
        key = (path, str(kwargs))
        if key not in known:
            known[key] = ls(self, path, **kwargs)
        return known[key]

    monkeypatch.setattr(kept, "ls", cached)
    monkeypatch.setattr(
        kept, "invalidate_cache", lambda self, path=None: (own.append(path), known.clear())
    )
    for step in (2, 4):
        folder.fs.store[f"/listed/run/step=00000{step}/meta.pt"] = None  # by another process
        assert [*directory.checkpoints_in(folder)][-1:] == [step]
    assert own == [None, None]
