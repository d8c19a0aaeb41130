"""Callbacks of Lightning's that would train something else in silence are refused before launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from armature.errors import ConfigError
from armature.training.stock_callbacks import CheckCallbacks
from armature.training.trainer import Trainer
from armature.validation import lightning_callbacks

STOCK = "lightning.pytorch.callbacks"
OWN = "tests.lightning_habits.callbacks.Unfreeze"  # derived from BaseFinetuning
MODULE = {
    "task": {"_target_": "tests.lightning_habits.regression.Regressor"},
    "model": {"_target_": "torch.nn.Linear"},
}
TASK = {
    "task": {"_target_": "armature.tasks.image_classification.ImageClassification"},
    "model": {"_target_": "armature.models.vit.model.VisionTransformer"},
}


def problems(target: str, method: str, objects: dict[str, Any]) -> list[str]:
    layout: Any = SimpleNamespace(methods=[method])
    return lightning_callbacks.problems(
        {**objects, "callbacks": {"mine": {"_target_": target}}}, layout
    )


@pytest.mark.parametrize(
    ("target", "method", "objects", "words"),
    [
        (f"{STOCK}.EMAWeightAveraging", "single", MODULE, None),
        (f"{STOCK}.EMAWeightAveraging", "ddp", MODULE, None),
        (
            f"{STOCK}.EMAWeightAveraging",
            "shard",
            MODULE,
            "ranks hold parts of it. Type callbacks=ema",
        ),
        (
            f"{STOCK}.WeightAveraging",
            "single",
            TASK,
            "before it has weights: ImageClassification builds it later",
        ),
        (f"{STOCK}.StochasticWeightAveraging", "ddp", MODULE, None),
        (f"{STOCK}.StochasticWeightAveraging", "pipeline", MODULE, "with this strategy (pipeline)"),
        (
            f"{STOCK}.StochasticWeightAveraging",
            "single",
            TASK,
            "averages nothing. Type callbacks=ema",
        ),
        (OWN, "single", MODULE, None),
        (OWN, "ddp", MODULE, None),
        (OWN, "pipeline", MODULE, "Type strategy=ddp or strategy=fsdp"),
        (f"{STOCK}.BackboneFinetuning", "tensor", MODULE, "with this strategy (tensor)"),
        (f"{STOCK}.EarlyStopping", "shard", TASK, None),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(target, method, objects, words):
    found = problems(target, method, objects)
    if words is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"callbacks.mine={target.rpartition('.')[2]} ")
        assert words in found[0]


class Finds(callbacks.LearningRateFinder):
    pass


@pytest.mark.parametrize(
    ("make", "layout", "words"),
    [
        (
            lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
            "single",
            "does not work here: accumulation is",
        ),
        (lambda: Finds(num_training_steps=2), "single", "Type -m sweep=lr"),
        (lambda: callbacks.ModelPruning("l1_unstructured"), "single", "Prune the finished"),
        (lambda: callbacks.WeightAveraging(), "shard", r"with this strategy \(shard\)"),
        (lambda: callbacks.StochasticWeightAveraging(0.1), "shard", "Type callbacks=ema"),
        (lambda: callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1), "single", None),
        (lambda: callbacks.EarlyStopping("val/loss"), "shard", None),
    ],
)
def test_callbacks_of_configure_callbacks_are_refused_as_well(make, layout, words, monkeypatch):
    """Before the first of their hooks that does something."""

    class Configures(BoringModel):
        trained = False

        def configure_callbacks(self):
            return [make()]

        def on_fit_start(self):
            self.trained = True

    monkeypatch.setattr("armature.layout.Layout.of", lambda cfg: SimpleNamespace(methods=[layout]))
    module, own = Configures(), CheckCallbacks(OmegaConf.create(MODULE))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[own],
    )
    if words is None:
        trainer.fit(module)
    else:
        with pytest.raises(ConfigError, match=words) as error:
            trainer.fit(module)
        assert "configure_callbacks of tests.lightning_habits.regression.Regressor" in str(
            error.value
        )
        assert not module.trained


def test_a_subclass_of_another_library_of_that_name_passes():
    class ModelPruning(L.Callback):
        pass

    layout: Any = SimpleNamespace(methods=["single"])
    assert lightning_callbacks.problem_of_object(ModelPruning, MODULE, layout) is None
