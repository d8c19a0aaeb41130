"""What weights of 4 bits cannot be combined with is found before launch."""

import pytest

from armature.finetune.check import LORA, adapter_of
from armature.layout import Layout
from armature.models.decoder.plan import PLAN
from armature.validation import combinations

MODEL = {
    "_target_": "armature.models.decoder.model.Decoder",
    "pretrained": "base",
    "width": 128,
    "heads": 4,
    "head_dim": None,
    "ffn_hidden": 256,
    "context": 64,
}
SINGLE = {"_target_": "armature.strategies.single.SingleDevice"}
MESH = "armature.strategies.mesh.MeshStrategy"


def problems(
    strategy: dict | None = None,
    *,
    ranks: int = 1,
    quantize: str | None = "nf4",
    **model,
) -> str:
    strategy = {**SINGLE, **(strategy or {})}
    cfg = {
        "trainer": {"devices": ranks},
        "model": {**MODEL, **model},
        "task": {"adapter": {"_target_": LORA, "quantize": quantize}},
        "strategy": strategy,
    }
    layout = Layout.resolve(strategy, world_size=ranks, plan=PLAN)
    found = combinations.problems(cfg, layout)
    assert all("Type " in problem or "must be" in problem for problem in found)
    return " ".join(found)


def test_what_works_is_not_refused():
    assert problems() == problems(quantize=None, pretrained=None) == ""
    assert problems({"_target_": "armature.strategies.ddp.DDP"}, ranks=2) == ""
    for axes in (
        {"shard": 2},
        {"tensor": 2},
        {"shard": 2, "tensor": 2},
        {"replicate": 2, "shard": 2},
    ):
        ranks = axes.get("shard", 1) * axes.get("tensor", 1) * axes.get("replicate", 1)
        assert problems({"_target_": MESH, **axes}, ranks=ranks) == ""


def test_shards_need_a_newer_torch(monkeypatch):
    monkeypatch.setattr(combinations.Run, "torch", (2, 11))
    assert "needs torch 2.12" in problems({"_target_": MESH, "shard": 2}, ranks=2)
    assert problems({"_target_": MESH, "tensor": 2}, ranks=2) == ""


@pytest.mark.parametrize(
    ("strategy", "ranks", "says"),
    [
        ({"_target_": MESH, "pipe": 2}, 2, "does not work with this strategy (pipeline)"),
        (
            {"_target_": "armature.strategies.deepspeed.DeepSpeed"},
            2,
            "does not work with this strategy (deepspeed)",
        ),
        ({"compile": "block"}, 1, "with strategy.compile=block"),
        (
            {"_target_": MESH, "tensor": 4},
            4,
            "strategy.tensor=4: each rank's rows are blocks of 64 elements, which do not divide",
        ),
    ],
)
def test_strategies_that_cannot_are_refused(strategy, ranks, says):
    assert says in problems(strategy, ranks=ranks)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"_target_": "example.model.Net"},
            "has been tried with armature.models.decoder.model.Decoder alone",
        ),
        (
            {"width": 96, "heads": 3},
            "model.width=96, model.heads × head_dim=96. Type task.adapter.quantize=null, or",
        ),
    ],
)
def test_models_that_cannot_are_refused(arguments, says):
    assert says in problems(**arguments)


def test_a_checkpoint_of_dense_weights_is_refused(tmp_path):
    cfg = {
        "model": MODEL | {"pretrained": None},
        "task": {"adapter": {"_target_": LORA, "quantize": "nf4"}},
        "resume": str(tmp_path),
    }
    layout = Layout.resolve(SINGLE, world_size=1, plan=PLAN)
    assert "not from a checkpoint" in " ".join(combinations.problems(cfg, layout))
    assert combinations.problems(cfg | {"resume": "auto"}, layout) == []


@pytest.mark.parametrize(
    "adapter", ["bottleneck", True, 3, {"_target_": "mine.Adapter", "quantize": "gptq"}]
)
def test_a_task_of_ones_own_may_mean_something_else_by_adapter(adapter):
    cfg = {"model": MODEL, "task": {"adapter": adapter}, "strategy": {}}
    assert adapter_of(cfg) is None
    layout = Layout.resolve(SINGLE, world_size=1, plan=PLAN)
    assert combinations.problems(cfg, layout) == []


def test_sizes_that_are_not_typed_are_the_models_own():
    sizes = {name: value for name, value in MODEL.items() if name != "ffn_hidden"}
    cfg = {"model": sizes, "task": {"adapter": {"_target_": LORA, "quantize": "nf4"}}}
    assert combinations.problems(cfg, Layout.resolve(SINGLE, world_size=1, plan=PLAN)) == []
