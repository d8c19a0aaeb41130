"""The last lines of a run, also if its object store is away."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningModule
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


def test_no_next_command_is_printed_if_the_module_measures_nothing(tmp_path, monkeypatch):
    lines, nothing = [], lambda *_, **__: None
    run = SimpleNamespace(
        cfg=OmegaConf.create({"run": {"dir": str(tmp_path)}}),
        trainer=SimpleNamespace(is_global_zero=True),
        samples=SimpleNamespace(finish=nothing),
        display=SimpleNamespace(show_metrics=nothing, print=lines.append),
        guard=SimpleNamespace(skipped=0),
        task=LightningModule(),
    )
    monkeypatch.setattr(report, "summarize", lambda *_, **__: {"global_step": 1})
    monkeypatch.setattr(report, "last_checkpoint", lambda _: "step=000001")
    report.finish(run, reason="finished", metrics={}, seconds=1, preview=None)  # pyright: ignore[reportArgumentType]
    assert lines == ["finished at step 1 after 1 s; checkpoint step=000001"]
