"""The formulas beside what the models themselves say, rules of thumb, and simulated peaks."""

import math
from typing import Any

import pytest
import torch
import yaml

from armature.models.cost import Cost
from armature.models.decoder.cost import cost as decoder_cost
from armature.models.decoder.model import Decoder
from armature.models.vit.cost import cost as vit_cost
from armature.models.vit.model import VisionTransformer
from armature.parallel.mesh import AXES
from armature.planning import devices, memory, seconds
from armature.planning.setup import Setup
from armature.project import CONFIGS

GIB = 2**30
H100 = devices.named("h100_80gb")


def arguments(name: str) -> dict[str, Any]:
    values = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text())
    return {key: value for key, value in values.items() if not key.startswith("_")}


def cost_of(name: str, **changes: Any) -> Cost:
    return decoder_cost({**arguments(name), **changes})


def mesh(**sizes: int) -> dict[str, Any]:
    axes = {**dict.fromkeys(AXES, 1), **sizes}
    return {"kind": "mesh", "axes": axes, "world_size": math.prod(axes.values())}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2_124m", {}),
        ("llama2_7b", {}),
        ("llama3_1b", {}),
        ("llama3_8b", {}),
        ("llama3_70b", {}),
        ("llama3_1b", {"head_dim": 96, "attention_bias": True}),
        ("llama3_1b", {"qk_norm": "weighted", "windows": [512] * 8 + [None] * 8}),
    ],
)
def test_a_decoders_cost_is_what_the_model_has(name, changes):
    args = {**arguments(name), **changes}
    with torch.device("meta"):
        model, inputs = Decoder(**args), torch.empty(1, args["context"], dtype=torch.long)
    cost = decoder_cost(args)
    assert cost.parameters == sum(param.numel() for param in model.parameters())
    assert cost.flops_per_sample == model.flops_per_sample(inputs)


def test_a_vision_transformers_cost_is_what_the_model_has():
    args = {
        "image_size": 16,
        "patch_size": 2,
        "channels": 3,
        "classes": 10,
        "width": 64,
        "layers": 4,
        "heads": 4,
    }
    with torch.device("meta"):
        model = VisionTransformer(**args)
    assert vit_cost(args).parameters == sum(param.numel() for param in model.parameters())


LORA, NF4 = {"adapter_rank": 16}, {"adapter_rank": 16, "in_4_bits": True}


@pytest.mark.parametrize(("adapters", "measured_gib"), [(LORA, 33.9), (NF4, 11.3)])
def test_adapters_of_8b_took_up_to_a_gib_more_on_an_h100(adapters, measured_gib):
    """docs/measured.md: all blocks recomputed, in eager mode, 2,048 tokens, four micro-batches of
    one sample.
    """
    setup = Setup(
        cost=cost_of("llama3_8b", context=2048),
        recompute="every",
        kind="single",
        accumulate=4,
        **adapters,
    )
    assert 0 <= measured_gib - memory.peak(setup).allocated_bytes / GIB < 1


@pytest.mark.parametrize(
    ("name", "micro", "recompute", "axes", "published"),
    # tokens per second and GPU that torchtitan published for compiled runs (docs/predicting.md)
    [
        ("llama3_8b", 2, "selective", {"shard": 8}, 6667),
        ("llama3_8b", 2, "selective", {"shard": 128}, 6514),
        ("llama3_8b", 12, "selective", {"shard": 8, "tensor": 8}, 4378),
        ("llama3_70b", 16, "every", {"shard": 32, "tensor": 8}, 597),
    ],
)
def test_published_throughput_lies_in_the_predicted_range(name, micro, recompute, axes, published):
    setup = Setup(cost=cost_of(name), micro=micro, recompute=recompute, **mesh(**axes))
    low, high = (
        rate / setup.world_size for rate in seconds.step_seconds(setup, H100).units_per_second
    )
    assert low <= published <= high


def test_recomputation_trades_seconds_for_memory():
    setups = [
        Setup(cost=cost_of("llama3_8b"), recompute=n, **mesh(shard=8))
        for n in ("none", "selective", "half", "every")
    ]
    peaks = [memory.peak(setup).total_bytes for setup in setups]
    times = [seconds.step_seconds(setup, H100).compute for setup in setups]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"),
    # a step copies gradients to fp32, which is 4 / 8 of each
    [(1, 2 + 18 / 8), (2, 2 + 18 / 8), (3, 20 / 8)],
)
def test_zero_shards_what_its_stage_says(stage, bytes_per_parameter):
    cost = cost_of("llama3_8b")
    found = memory.peak(Setup(cost=cost, kind="deepspeed", stage=stage, world_size=8))
    size = bytes_per_parameter * cost.parameters
    assert found.least_bytes == pytest.approx(size + memory.allowance_bytes(size, ranks=8))
