"""Samples of real runs, and their report.html: never the reason why a run fails or differs."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from armature.pages import history
from armature.strategies.single import SingleDevice
from armature.training import samples
from armature.training.samples import Samples, image_rows

COMMON = ("trainer.max_steps=4", "trainer.val_every_n_steps=2", "task.preview_tokens=8")


@pytest.mark.slow
def test_runs_have_a_page_that_changes_nothing_else(tmp_path, train, cache):
    for name, typed in {"with": (), "without": ("run.report=false",)}.items():
        train(f"run.name={name}", *COMMON, *typed)
    with_page, without = (tmp_path / "outputs" / name for name in ("with", "without"))
    assert (with_page / "metrics.csv").read_bytes() == (without / "metrics.csv").read_bytes()
    assert not list(without.glob("report*"))
    page = (with_page / "report.html").read_text()
    assert "4 of 4" in page
    assert ">finished<" in page
    kinds = [(event["event"], event["step"]) for event in history.read(with_page).events]
    assert kinds[0] == ("start", 0)
    assert {("text", 2), ("text", 4)} <= {*kinds}


@pytest.mark.slow
def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, train, cache):
    (tmp_path / "outputs" / "mine" / "report.html" / "in the way").mkdir(parents=True)
    result = train("run.name=mine", "strategy=fsdp", *COMMON, ranks=2)
    assert result.stderr.count("report.html lacks a part") == 1


@pytest.fixture
def kept(tmp_path):
    cfg = OmegaConf.create({"run": {"dir": str(tmp_path), "git": None, "report": True}})
    return Samples(cfg, planned_steps=10)


def test_samples_take_a_hundredth_of_the_time(kept):
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), sanity_checking=False, strategy=SingleDevice()
    )
    kept._began = time.monotonic() - 50

    def is_due() -> bool:
        kept.on_validation_start(trainer, None)
        return kept._due

    assert is_due()
    kept._spent = 0.4
    assert is_due()
    kept._spent = 0.6
    assert not is_due()


def test_a_preview_that_needs_arguments_has_another_purpose():
    class Module:
        def preview(self, *names, **more): ...

    class Needs:
        def preview(self, image): ...

    assert samples.preview_of(Module()) is not None  # pyright: ignore[reportArgumentType]
    for other in (Needs(), object(), SimpleNamespace(preview="text")):
        assert samples.preview_of(other) is None  # pyright: ignore[reportArgumentType]


def test_images_become_bytes_of_one_scale_with_the_names_of_their_classes():
    images = torch.stack([torch.zeros(3, 200, 100), torch.ones(3, 200, 100)])
    rows = image_rows(images, torch.tensor([0, 1]), torch.tensor([1, 5]), ["cat", "dog"])
    assert [(row["predicted"], row["target"]) for row in rows] == [("dog", "cat"), ("5", "dog")]
    assert (rows[0]["width"], rows[0]["height"]) == (32, 64)
    assert json.loads(json.dumps(rows)) == rows
