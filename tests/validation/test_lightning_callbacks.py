"""Callbacks of Lightning's that would train something else in silence are refused before launch."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch import callbacks

from armature.validation import combinations, signatures

STOCK = "lightning.pytorch.callbacks"
USERS = "tests.validation.users"
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
    cfg = {**objects, "callbacks": {"mine": {"_target_": target}}}
    return [*combinations._of_callbacks(combinations.Run(cfg, layout(method)))]


def layout(method: str) -> Any:
    return SimpleNamespace(kind="other", methods=[method], plan=None, axes={})


@pytest.mark.parametrize(
    ("target", "method", "objects", "words"),
    [
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
        (OWN, "ddp", MODULE, None),
        (OWN, "pipeline", MODULE, "Type strategy=ddp or strategy=fsdp"),
        (f"{STOCK}.EarlyStopping", "shard", TASK, None),
        (f"{STOCK}.LearningRateFinder", "single", MODULE, "Type -m sweep=lr"),
        (f"{USERS}.FineTuneLearningRateFinder", "ddp", MODULE, "RateFinder does not work here"),
        (f"{STOCK}.SpikeDetection", "single", MODULE, "a stopped run could not be resumed"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(target, method, objects, words):
    found = problems(target, method, objects)
    if words is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"callbacks.mine._target_={target}: ")
        assert words in found[0]


def test_a_subclass_of_another_library_of_that_name_passes():
    class ModelPruning(L.Callback):
        pass

    assert combinations.callback_problems([ModelPruning], MODULE, layout("single")) == []
    (problem,) = combinations.callback_problems([callbacks.ModelPruning], MODULE, layout("single"))
    assert "Prune the finished model" in problem
