"""The last line of a run whose object store is away."""

import pytest
from omegaconf import OmegaConf

from armature.training import report


def test_a_store_that_is_away_does_not_fail_the_run_that_ends(tmp_path, monkeypatch):
    upath = pytest.importorskip("upath")
    cfg = OmegaConf.create(
        {"run": {"dir": str(tmp_path), "name": "a"}, "checkpoint": {"root": "memory://gone"}}
    )
    assert report.last_checkpoint(cfg) is None

    class StoreError(Exception):
        """Of an object store's client, whose classes are no OSError."""

    def away(*_, **__) -> None:
        raise StoreError("Could not connect")

    monkeypatch.setattr(type(upath.UPath("memory://gone")), "is_dir", away)
    assert report.last_checkpoint(cfg) == "unknown (memory://gone/a: StoreError: Could not connect)"
