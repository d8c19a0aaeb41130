"""Classifiers of images that timm computes, without torchvision: logits, layouts, a run, and what
is refused.
"""

import csv
import json
from pathlib import Path

import pytest

from armature.finetune import folder
from tests import needs, running
from tests.data.test_people_data import write_images
from tests.finetune import extras, image_models
from tests.finetune.extras import command
from tests.finetune.image_models import KINDS
from tests.finetune.layouts import assert_equal
from tests.finetune.test_huggingface_runs import EVERY, assert_measured_as_at_the_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    needs.extra("timm")
    root = tmp_path_factory.mktemp("images")
    extras.call(image_models.make, root)
    return root


def test_logits_are_timms_own(folders):
    far = extras.call(image_models.logits, folders)
    assert {*far} == {*KINDS}
    assert max(far.values()) <= 1e-6, far


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_train_as_one_process_does(folders, kind):
    layouts = [
        name
        for name in EVERY
        if "tensor" not in name and (kind != "resnet" or "deepspeed" not in name)
    ]
    assert_equal(extras.call(image_models.fit, folders, kind, layouts), layouts)


def train(root: Path, base: Path, *more: str, code: int = 0) -> str:
    return command(
        running.ROOT / "train.py",
        "experiment=finetune_image",
        f"model.pretrained={base}",
        "model.classes=10",
        "data=digits",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.max_epochs=null",
        "trainer.val_every_n_steps=null",
        "scheduler.warmup=0",
        "scheduler.final=1.0",
        "trainer.log_every_n_steps=1",
        "optimizer.lr=2e-3",
        f"run.root={root}",
        "logger=none",
        "launch.max_restarts=0",
        *more,
        code=code,
    )


def test_a_run_on_digits_resumes_bit_for_bit_without_its_folder(folders, tmp_path):
    base = tmp_path / "base"
    base.symlink_to(folders / "vit")
    layout = ["strategy=fsdp", "trainer.devices=2"]
    said = train(tmp_path, base, "run.name=whole", *layout, "trainer.max_steps=8")
    assert "head.weight, head.bias begin at random" in said
    train(tmp_path, base, "run.name=run", *layout, "trainer.max_steps=5")
    base.unlink()
    assert "is not there any more" in train(
        tmp_path, base, "run.name=run", *layout, "trainer.max_steps=8"
    )
    assert running.losses(tmp_path / "run") == running.losses(tmp_path / "whole")
    scripts, run = running.ROOT / "scripts", tmp_path / "run"
    assert_measured_as_at_the_end(run)
    out = tmp_path / "predictions.csv"
    command(scripts / "predict.py", run, f"out={out}", "--accelerator", "cpu")
    assert {*csv.DictReader(out.open()).__next__()} >= {"class", "probability"}


def test_what_does_not_fit_is_said_before_any_process_starts(folders, tmp_path):
    few = ["run.name=refused", "trainer.max_steps=1"]
    said = train(tmp_path, folders / "vit", *few, "strategy=tensor", "trainer.devices=2", code=2)
    assert "timm has no plan for VisionTransformer. Type strategy=fsdp" in said
    assert "does not work with this strategy (pipeline)" in train(
        tmp_path, folders / "vit", *few, "strategy=pipeline", "trainer.devices=2", code=2
    )
    said = train(tmp_path, folders / "vit", *few, "model.new_head=false", code=2)
    assert "model.classes=10, but the head of" in said
    assert "tells 7 classes apart" in said
    assert "the data need at least 10" in train(
        tmp_path, folders / "vit", *few, "model.classes=3", code=2
    )
    # the folder's model takes one channel, and photos have three
    write_images(tmp_path / "photos", 12)
    photos = ["data=image_folder", f"data.path={tmp_path / 'photos'}"]
    said = train(tmp_path, folders / "vit", *few, *photos, code=2)
    assert "The data have image_size=64, and model.pretrained=" in said
    assert "Type data.size=8" in said
    assert "The data have channels=3" in said
    base = tmp_path / "base"
    base.mkdir()
    (base / folder.WEIGHTS).symlink_to(folders / "vit" / folder.WEIGHTS)
    config = folder.config(folders / "vit")
    for changes, words in (
        ({"architecture": "mine"}, "has no architecture=mine. Install a newer version"),
        (
            {"architecture": None, "model_type": "vit"},
            "it has no architecture, the name of a model of timm, but model_",
        ),
        (
            {"model_args": {**config["model_args"], "depth": 2}},
            "ImageClassifier has no such tensors",
        ),
    ):
        (base / folder.CONFIG).write_text(json.dumps({**config, **changes}))
        assert words.replace("ImageClassifier", "VisionTransformer") in train(
            tmp_path, base, *few, code=2
        )
    assert not (tmp_path / "refused").exists()
