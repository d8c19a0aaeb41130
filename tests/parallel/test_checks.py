import re
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from armature.errors import ConfigError
from armature.layout import Layout
from armature.models.decoder.plan import PLAN
from armature.models.plan import Plan
from armature.parallel.mesh import AXES
from armature.validation import combinations as checks
from armature.validation import signatures
from tests.features import KINDS, OPTIONAL, TYPED, refused
from tests.support.parity.harness import DECODER

SINGLE = {"_target_": "armature.strategies.single.SingleDevice"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": SINGLE,
    "ddp": {"_target_": "armature.strategies.ddp.DDP"},
    "shard": {"shard": 2},
    "context": {"context": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipe": 2},
    "deepspeed": {"_target_": "armature.strategies.deepspeed.DeepSpeed", "stage": 2},
    "zero3": {"_target_": "armature.strategies.deepspeed.DeepSpeed", "stage": 3},
}
MESH = {
    "_target_": "armature.strategies.mesh.MeshStrategy",
    "pipe": 1,
    "replicate": 1,
    "shard": 1,
    "context": 1,
    "context_method": "auto",
    "tensor": 1,
    "schedule": "1f1b",
    "virtual_stages": 2,
    "async_tensor": "auto",
    "microbatches": 4,
    "stages": None,
    "sequence_parallel": True,
}
EXPERTS = replace(PLAN, experts="blocks.*.experts", expert_count="experts")
BY_HEADS = replace(PLAN, context={"embed": "part", "blocks.*.attention.core": "heads"})
MODEL = {"_target_": "mine.Model", **DECODER}


def found(
    strategy: dict[str, Any],
    *,
    world_size: int | None = None,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    plan: Plan | None = PLAN,
    micro_batch_size: int | str = 8,
    **cfg: Any,
) -> list[str]:
    defaults = {
        "precision": "32-true",
        "accelerator": "gpu",
        "gradient_clip_val": 1.0,
        "gradient_clip_algorithm": "norm",
        "on_nan": "stop",
    }
    base = MESH if "_target_" not in strategy else {}
    if world_size is None:
        made = prod(strategy.get(axis, 1) for axis in AXES)
        world_size = made if base else 1 if SINGLE.items() <= strategy.items() else 2
    whole = {
        "strategy": base | strategy,
        "trainer": defaults | (trainer or {}),
        "model": MODEL | (model or {}),
        "data": {"micro_batch_size": micro_batch_size},
        "optimizer": {"_target_": "torch.optim.AdamW"},
        "callbacks": {},
    } | cfg
    try:
        return checks.problems(
            whole, Layout.resolve(whole["strategy"], world_size=world_size, plan=plan)
        )
    except ConfigError as error:
        return error.problems


def with_feature(feature: str) -> dict[str, Any]:
    """What a feature of the table is in a configuration: arguments of `found`."""
    if feature == "ema":
        return {"callbacks": {"ema": {"_target_": OPTIONAL["ema"]}}}
    if feature == "muon":
        return {"optimizer": {"_target_": OPTIONAL["muon"]}}
    key, _, value = TYPED[feature].partition("=")
    group, _, name = key.partition(".")
    return {group: {name: value}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", TYPED)
def test_each_cell_of_the_table_is_refused_or_allowed_as_it_says(feature, kind):
    arguments = with_feature(feature)
    problems = found(LAYOUTS[kind] | arguments.pop("strategy", {}), **arguments)
    columns = {"zero3": ("deepspeed", "zero3"), "context": ("shard", "context")}.get(kind, (kind,))
    reasons = [refused(feature)[column] for column in columns if column in refused(feature)]
    assert len(problems) == len(reasons), problems
    for reason, problem in zip(reasons, problems, strict=True):
        assert reason in problem
        assert "Type" in problem


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        ({"tensor": 2}, {"model": {"heads": 3}}, "does not divide model.heads=3"),
        (
            {"tensor": 4},
            {},
            "strategy.tensor=4 does not divide model.kv_heads=2. Type strategy.tensor=2",
        ),
        ({"tensor": 2}, {"model": {"vocab_size": 97}}, "model.vocab_size=98"),
        ({"tensor": 2}, {"model": {"context": 15}}, "strategy.sequence_parallel=false"),
        (
            {"tensor": 4},
            {
                "model": {"kv_heads": 4},
                "data": {"context": 14, "micro_batch_size": 8},
            },
            "strategy.tensor=4 does not divide data.context=14, .* or data.context=16",
        ),
        (
            LAYOUTS["deepspeed"],
            {"task": {"_target_": "tests.lightning_habits.gradients.OwnClipping"}},
            "task=OwnClipping has configure_gradient_clipping, .* Type strategy=fsdp",
        ),
        (
            {"shard": 2, "activation_checkpointing": 0.5},
            {},
            "strategy.activation_checkpointing=0.5 is a share .* Type strategy.compile=block",
        ),
        (
            {"context": 2},
            {"plan": replace(PLAN, context={})},
            "plan of mine.Model names no attention in `context`",
        ),
        (
            {"context": 4, "tensor": 2},
            {"plan": BY_HEADS},
            "strategy.context=4 × strategy.tensor=2 does not divide model.heads=4: .* Type "
            "strategy.context=2.$",
        ),
        (
            {"context": 3, "context_method": "all_to_all"},
            {"model": {"context": 18}, "data": {"context": 18}},
            "strategy.context=3 does not divide model.heads=4: .* strategy.context=1 or "
            "strategy.context_method=all_gather",
        ),
        (
            {"context": 2, "context_method": "all_gather"},
            {"plan": BY_HEADS},
            "names no causal attention in `context`. Type strategy.context_method=all_to_all",
        ),
        (
            {"context": 2},
            {"data": {"context": 15, "micro_batch_size": 8}},
            "data.context=15. Type data.context=16",
        ),
        (
            {"context": 2, "tensor": 2},
            {"data": {"context": 18, "micro_batch_size": 8}},
            "2 × strategy.context=2 with strategy.tensor=2 does not divide the positions of "
            "data.context=18. Type .*=20",
        ),
        (
            {"context": 2},
            {"data": {"multiple": 1, "micro_batch_size": 8}},
            "data.multiple=1. Type data.multiple=4",
        ),
        ({"pipe": 2}, {"plan": None}, "has no plan, .* its argument model"),
        ({"pipe": 2}, {"model": {"layers": 1}}, "makes 2 stages, but model.layers=1"),
        ({"pipe": 2, "schedule": "zero_bubble"}, {"model": {"layers": 3}}, "schedule=1f1b, or"),
        ({"pipe": 2, "microbatches": 1}, {}, "too few .* Type strategy.microbatches=2"),
        (
            {"pipe": 2, "schedule": "interleaved_1f1b", "microbatches": 3},
            {"micro_batch_size": 9},
            "microbatches=4",
        ),
        (
            {"pipe": 2},
            {"data": {"micro_batch_size": 6, "global_batch_size": 36}},
            "data.micro_batch_size=6 is not a multiple of strategy.microbatches=4. Type "
            "strategy.microbatches=3, or data.micro_batch_size=4.$",
        ),
        (
            {"pipe": 2},
            {"data": {"micro_batch_size": 6, "global_batch_size": 18}},
            "microbatches=3, or data.micro_batch_size=4 and data.global_batch_size=20.$",
        ),
        (
            {"pipe": 2, "microbatches": 16},
            {
                "micro_batch_size": "auto",
                "data": {"micro_batch_size": "auto", "global_batch_size": 8},
            },
            "is more than the 8 samples .* Type strategy.microbatches=8",
        ),
        (
            {"pipe": 2, "stages": [3, 2]},
            {},
            "must be 2 numbers from 1 that add up to model.layers=4",
        ),
        ({"pipe": 2}, {"model": {"tied": True}}, "Type model.tied=false"),
        (
            {"pipe": 2},
            {"model": {"document_token": 0}},
            "Type model.document_token=null, or strategy=fsdp",
        ),
        (
            {"pipe": 2, "schedule": "zero_bubble", "compile": "block"},
            {},
            "Type strategy.compile=none",
        ),
        (
            {"pipe": 2, "shard": 2, "schedule": "zero_bubble", "reshard_after_forward": True},
            {},
            "Type strategy.reshard_after_forward=false, or strategy.schedule=1f1b",
        ),
        ({"shard": 2, "cpu_offload": True}, {"trainer": {"accelerator": "cpu"}}, "no GPU"),
        (
            {"shard": 2},
            {"trainer": {"precision": "64-true"}},
            "Type trainer.precision=32-true, or strategy=ddp",
        ),
        (
            {"shard": 2, "compile_mode": "reduce-overhead"},
            {},
            "nothing is compiled. Type strategy.compile=model",
        ),
        (
            {"shard": 2, "compile": "block", "compile_mode": "reduce-overhead"},
            {},
            r"\(shard\): a CUDA graph .* Type strategy.compile_mode=max-autotune-no-cudagraphs",
        ),
        ({"shard": 2, "float8": "emulate"}, {"plan": None}, "names the blocks .* argument model"),
        (
            {"shard": 2, "float8": True},
            {"trainer": {"accelerator": "cpu"}},
            "cpu has no float8 products",
        ),
        (
            {"shard": 2, "float8": True},
            {"trainer": {"accelerator": "gpu", "precision": "bf16-mixed"}},
            "under autocast unless they are compiled, .* Type strategy.compile=block",
        ),
        ({"shard": 2, "float8": True}, {}, "Type trainer.precision=bf16-mixed"),
        ({"shard": 3}, {"world_size": 2}, "does not make up the 2 processes"),
        (SINGLE, {"world_size": 2}, "strategy=single is one process"),
        (
            LAYOUTS["ddp"],
            {"trainer": {"precision": "16-mixed", "accelerator": "cpu"}},
            "16-mixed needs a GPU",
        ),
        (
            {"pipe": 2, "schedule": "zero_bubble", "activation_checkpointing": "selective"},
            {},
            "Type strategy.activation_checkpointing=every, or strategy.schedule=1f1b.",
        ),
        (
            {"shard": 2, "expert": 2},
            {},
            "strategy.expert=2: Model has no experts. Type strategy.expert=1",
        ),
        (
            {"shard": 4, "expert": 3},
            {"model": {"experts": 9}},
            r"strategy.expert=3 does not divide the 4 ranks that it is made of \(strategy.shard=4, "
            r".*expert=2",
        ),
        (
            {"shard": 4, "expert": 4},
            {"model": {"experts": 6}},
            "strategy.expert=4 does not divide model.experts=6. Type strategy.expert=2, or "
            "model.experts=8",
        ),
        (
            {"tensor": 2, "sequence_parallel": False},
            {"model": {"experts": 8}},
            "strategy.tensor=2 with strategy.sequence_parallel=False: .* Type "
            "strategy.sequence_parallel=true",
        ),
        (
            {"shard": 2, "expert": 2, "cpu_offload": True},
            {"model": {"experts": 8}},
            "Type strategy.cpu_offload=false",
        ),
        (
            {"shard": 2, "expert": 2, "compile": "block"},
            {"model": {"experts": 8}},
            "Type strategy.compile=none",
        ),
        (
            {"shard": 2, "float8": "emulate"},
            {"model": {"experts": 8}},
            "experts are none. Type strategy.float8=false",
        ),
        (
            {"shard": 6, "expert": 2},
            {"model": {"experts": 8, "width": 16, "expert_hidden": 12}},
            "which do not divide model.width=16. Type model.experts=12",
        ),
        (
            {"tensor": 2, "cpu_offload": True},
            {"model": {"experts": 8}},
            "cpu_offload=true with strategy.tensor=2 has not been tried .* Type "
            "strategy.cpu_offload=false",
        ),
        (
            {"shard": 2, "expert": 2, "reduce_dtype": "float16"},
            {"model": {"experts": 8}},
            "reduce_dtype=float16 with strategy.expert=2 would reduce .* Type "
            "strategy.reduce_dtype=float32",
        ),
        (
            {"shard": 2, "expert": 2, "param_dtype": "float16"},
            {"model": {"experts": 8}, "trainer": {"precision": "32-true"}},
            "strategy.param_dtype=float16 with strategy.expert=2 would reduce gradients in float16",
        ),
        (
            {"shard": 2, "expert": 2},
            {"model": {"experts": 8}, "trainer": {"precision": "16-true"}},
            "trainer.precision=16-true with strategy.expert=2 would reduce gradients in float16",
        ),
        (
            {"pipe": 2, "tensor": 2, "schedule": "zero_bubble", "reshard_after_forward": True},
            {"model": {"experts": 8}},
            "strategy.schedule=zero_bubble with strategy.reshard_after_forward=true",
        ),
    ],
)
def test_what_cannot_work_is_said_before_launch(strategy, arguments, message):
    signatures.allow(["tests"])
    plan = EXPERTS if "experts" in arguments.get("model", {}) else PLAN
    with pytest.raises(ValueError, match=message):
        raise ValueError("\n".join(found(strategy, **{"plan": plan, **arguments})))


@pytest.mark.parametrize(
    ("strategy", "accelerator"),
    [
        ({"shard": 2, "context": 2, "tensor": 2, "expert": 8}, "gpu"),
        ({"tensor": 2, "expert": 2, "sequence_parallel": "auto"}, "cpu"),
        ({"pipe": 2, "shard": 2, "expert": 2, "compile": "block"}, "cpu"),
    ],
)
def test_an_expert_axis_is_made_of_ranks_of_other_axes(strategy, accelerator):
    arguments = {"model": {"experts": 8}, "trainer": {"accelerator": accelerator}, "plan": EXPERTS}
    assert found(strategy, **arguments) == []


def test_zero_bubble_on_cpus_needs_a_newer_torch(monkeypatch):
    monkeypatch.setattr(checks.Run, "torch", (2, 11))
    asked = {"pipe": 2, "schedule": "zero_bubble"}
    assert found(asked) == []
    (message,) = found(asked, trainer={"accelerator": "cpu"})
    assert message.endswith("Type pip install -U torch, or strategy.schedule=1f1b.")


def test_a_module_that_builds_its_own_model_may_have_experts():
    own, ours = "lightning.pytorch.demos.boring_classes.BoringModel", "armature.tasks.base.Task"
    assert found({"shard": 2, "expert": 2}, plan=None, task={"_target_": own}) == []
    (message,) = found({"shard": 2, "expert": 2}, plan=None, task={"_target_": ours})
    assert "strategy.expert=2: Model has no experts" in message


def test_float8_is_refused_without_torchao_and_on_older_gpus(
    monkeypatch,
):
    arguments = {"trainer": {"precision": "bf16-mixed"}}
    for capability, problems in (((9, 0), 0), ((8, 9), 0), ((8, 0), 1)):
        monkeypatch.setattr(checks.hardware, "compute_capability", lambda found=capability: found)
        messages = found({"shard": 2, "float8": True, "compile": "block"}, **arguments)
        assert len(messages) == problems
        assert all(
            "this one has 8.0. Type strategy.float8=false" in message for message in messages
        )
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert "Type pip install torchao" in found({"shard": 2, "float8": "emulate"})[0]


@pytest.mark.parametrize("strategy", [SINGLE, LAYOUTS["ddp"]])
def test_cuda_graphs_are_for_weights_that_stay_in_place(strategy):
    graphs = strategy | {"compile_mode": "reduce-overhead"}
    assert found(graphs | {"compile": "model"}) == []
    [problem] = found(graphs | {"compile": "block"})
    assert (
        "Type strategy.compile=model, or strategy.compile_mode=max-autotune-no-cudagraphs."
        in problem
    )


def test_each_rule_says_what_to_do_instead():
    told = [said for rules in (checks.RULES | checks.CALLBACKS).values() for _, said in rules]
    assert len(told) > 60
    assert [said for said in told if not re.search("(?i)type |prune|must be|leave", said)] == []


def test_cuda_graphs_are_for_steps_of_one_micro_batch():
    checks.check_graphs("reduce-overhead", 1)
    checks.check_graphs("max-autotune-no-cudagraphs", 2)
    with pytest.raises(
        ConfigError, match="compile_mode=reduce-overhead with 2 micro-batches per step"
    ):
        checks.check_graphs("reduce-overhead", 2)


def test_the_layouts_of_the_table_have_no_problem_by_themselves():
    for strategy in LAYOUTS.values():
        assert found(strategy) == []


def test_data_axis_leaves_out_context_tensor_and_pipeline():
    asked = MESH | {"pipe": 2, "replicate": 2, "shard": "auto", "tensor": 2}
    assert Layout.resolve(asked, world_size=16).data_ranks == 4
    asked = MESH | {"replicate": 2, "shard": "auto", "context": 2, "tensor": 2}
    layout = Layout.resolve(asked, world_size=16)
    assert layout.data_ranks == 4
    assert layout.methods == ["shard", "context", "tensor"]
