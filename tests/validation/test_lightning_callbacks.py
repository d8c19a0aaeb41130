"""Callbacks of Lightning's that would train something else in silence are refused before launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch import callbacks

from armature.validation import lightning_callbacks, signatures

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
    signatures.allow(["tests"])
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
        (f"{STOCK}.StochasticWeightAveraging", "single", MODULE, "Type callbacks=ema"),
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


def test_a_subclass_of_another_library_of_that_name_passes():
    class ModelPruning(L.Callback):
        pass

    layout: Any = SimpleNamespace(methods=["single"])
    assert lightning_callbacks.problem_of_object(ModelPruning, MODULE, layout) is None
