"""The formulas beside what the models themselves say, rules of thumb, and simulated peaks."""

import math
from typing import Any

import pytest
import torch
import yaml

from armature.config import CONFIGS
from armature.finetune import nf4
from armature.finetune.lora import Lora
from armature.models.cost import Cost
from armature.models.decoder.cost import cost as decoder_cost
from armature.models.decoder.model import Decoder
from armature.models.mixture.cost import cost as mixture_cost
from armature.models.vit.cost import cost as vit_cost
from armature.models.vit.model import VisionTransformer
from armature.parallel.mesh import AXES
from armature.planner import budget, devices, memory, seconds
from armature.planner.setup import Adapters, Setup
from armature.simulation.roofline import Roofline

GIB = 2**30
H100, A100 = devices.named("h100_80gb"), devices.named("a100_80gb")


def arguments(name: str) -> dict[str, Any]:
    values = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text())
    return {key: value for key, value in values.items() if not key.startswith("_")}


def cost_of(name: str, **changes: Any) -> Cost:
    return decoder_cost({**arguments(name), **changes})


def mesh(**sizes: int) -> dict[str, Any]:
    axes = {**dict.fromkeys(AXES, 1), **sizes}
    return {"kind": "mesh", "axes": axes, "world_size": math.prod(axes.values())}


@pytest.mark.parametrize("name", ["gpt2_124m", "llama2_7b", "llama3_1b", "llama3_8b", "llama3_70b"])
def test_a_decoders_cost_is_what_the_model_has(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(**arguments(name))
        inputs = torch.empty(1, arguments(name)["context"], dtype=torch.long)
    cost = cost_of(name)
    assert cost.parameters == sum(param.numel() for param in model.parameters())
    assert cost.flops_per_sample == model.flops_per_sample(inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 96, "attention_bias": True},
        {"qk_norm": "weighted", "windows": [512] * 8 + [None] * 8},
    ],
)
def test_a_decoders_cost_counts_its_options(changes: dict[str, Any]) -> None:
    args = {**arguments("llama3_1b"), **changes}
    with torch.device("meta"):
        model, inputs = Decoder(**args), torch.empty(1, args["context"], dtype=torch.long)
    cost = decoder_cost(args)
    assert cost.parameters == sum(param.numel() for param in model.parameters())
    assert cost.flops_per_sample == model.flops_per_sample(inputs)


def test_a_vision_transformers_cost_is_what_the_model_has() -> None:
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


def test_70b_in_bf16_is_140_gb_of_weights_alone() -> None:
    state = memory.peak(
        Setup(cost=cost_of("llama3_70b"), kind="single", precision="bf16-true")
    ).bytes_by_kind
    assert state["parameters"] == pytest.approx(140e9, rel=0.01)


def test_7b_with_adamw_does_not_fit_one_gpu_under_ddp_and_does_under_fsdp_on_eight() -> None:
    cost = cost_of("llama2_7b")
    ddp = memory.peak(Setup(cost=cost, kind="ddp", world_size=8))
    assert ddp.state_bytes == 16 * cost.parameters > H100.memory_bytes
    assert memory.peak(Setup(cost=cost, **mesh(shard=8))).total_bytes < H100.memory_bytes


def test_a_mesh_gathers_fp16_with_fp16_unless_it_is_told_another_type() -> None:
    setup = Setup(cost=cost_of("llama3_1b", context=1024), precision="16-mixed", **mesh(shard=8))
    assert (
        memory.peak(setup).allocated_bytes
        == memory.peak(setup.with_(precision="bf16-mixed")).allocated_bytes
    )
    wide = setup.with_(param_dtype="float32")
    simulated = 0.100
    assert seconds.step_seconds(wide, devices.named("v100")).communication == pytest.approx(
        simulated, rel=0.1
    )


@pytest.mark.parametrize(
    ("options", "gathered", "reduced"),
    [
        ({}, 2, 4),
        ({"reduce_dtype": "bfloat16"}, 2, 2),
        ({"precision": "16-mixed"}, 2, 4),
        ({"precision": "16-true"}, 2, 2),
        ({"precision": "bf16-true"}, 2, 4),
        ({"precision": "32-true"}, 4, 4),
        ({"precision": "32-true", "param_dtype": "bfloat16"}, 2, 2),
        ({"precision": "32-true", "reduce_dtype": "float64"}, 4, 8),
        ({"precision": "64-true"}, 8, 8),
    ],
)
def test_gradients_are_reduced_in_the_type_that_fsdp_takes(options, gathered, reduced) -> None:
    setup = Setup(
        cost=cost_of("llama3_1b", context=1024), reshard=False, **options, **mesh(shard=8)
    )
    assert (setup.gathered_bytes, setup.reduced_bytes) == (gathered, reduced)
    size = (gathered + reduced) * setup.cost.parameters * 7 / 8
    found = seconds.step_seconds(setup, H100).communication
    assert found == pytest.approx(size / H100.link_rate(ranks=8, here=8), rel=1e-6)


LORA, NF4 = {"adapters": Adapters(rank=16)}, {"adapters": Adapters(rank=16, in_4_bits=True)}
SHORT = {"kind": "single", "context": 2048, "accumulate": 4}


@pytest.mark.parametrize(("adapters", "measured_gib"), [(LORA, 33.9), (NF4, 11.3)])
def test_adapters_of_8b_took_up_to_a_gib_more_on_an_h100(
    adapters: dict[str, Any], measured_gib: float
) -> None:
    """docs/gpus.md: all blocks recomputed, in eager mode, 2,048 tokens, four micro-batches of one
    sample.
    """
    setup = Setup(
        cost=cost_of("llama3_8b", context=2048),
        recompute="every",
        kind="single",
        accumulate=4,
        **adapters,
    )
    assert 0 <= measured_gib - memory.peak(setup).allocated_bytes / GIB < 1


def test_a_pipelines_gradients_of_adapters_are_theirs_alone() -> None:
    """Those of the whole stage, which FSDP keeps unsharded in fp32, would be 16 GB here, and the
    head's another 3.
    """
    setup = Setup(
        cost=cost_of("llama3_8b", context=2048),
        micro=4,
        reshard=False,
        **mesh(pipe=2, shard=2),
        **LORA,
    )
    assert memory.peak(setup).bytes_by_kind["temporary"] < 2 * GIB


def test_a_pipeline_with_a_context_axis_holds_all_logits() -> None:
    cost = cost_of("llama3_8b", context=32_768)
    setup = Setup(cost=cost, micro=4, reshard=False, recompute="every", **mesh(pipe=2, context=2))
    assert memory.peak(setup).bytes_by_kind["temporary"] > 12 * 16_384 * cost.classes


def test_a_pipelines_gradients_of_experts_are_those_of_a_rank() -> None:
    cost = mixture_cost(arguments("qwen3_30b_a3b"))
    setup = Setup(
        cost=cost,
        micro=8,
        microbatches=8,
        reshard=False,
        recompute="every",
        **mesh(pipe=2, shard=8),
    )
    apart = memory.peak(setup.with_(expert=8)).bytes_by_kind["temporary"]
    saved = (
        4 * setup.blocks_by_rank[0] * cost.experts * 7 / 8
    )  # of fp32, without the experts of other ranks
    assert memory.peak(setup).bytes_by_kind["temporary"] - apart > 0.9 * saved


def test_matrices_of_4_bits_have_the_bytes_of_their_parts() -> None:
    args = {**arguments("llama3_1b"), "layers": 1, "vocab_size": 64}
    with torch.device("meta"):
        model = Decoder(**args)
        Lora(rank=16, quantize="nf4").add_to(model)
    setup = Setup(cost=decoder_cost(args), kind="single", **NF4)
    linears = nf4.in_4_bits(model).values()
    assert setup.matrix_bytes == sum(
        linear.get_parameter(part).nbytes for linear in linears for part in nf4.PARTS
    )
    assert setup.adapted == sum(
        param.numel() for param in model.parameters() if param.requires_grad
    )
    state = memory.peak(setup).state_bytes
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert state == sum(param.nbytes for param in model.parameters()) + 12 * trained


def test_weights_of_the_last_unit_are_gathered_once() -> None:
    """llama3_8b with 4 layers, fsdp 8, two micro-batches, simulated on 2026-11-23."""
    setup = Setup(cost=cost_of("llama3_8b", layers=4, context=2048), accumulate=2, **mesh(shard=8))
    assert seconds.step_seconds(setup, H100).communication == pytest.approx(0.06968, rel=0.01)


def test_a_pipelines_ends_send_in_one_direction() -> None:
    """llama3_8b with 4 layers in fp32 between two stages, simulated on 2026-11-23: 0.25 GiB."""
    setup = Setup(
        cost=cost_of("llama3_8b", layers=4, context=2048), micro=8, reshard=False, **mesh(pipe=2)
    )
    found = seconds.step_seconds(setup, H100)
    assert found.communication == pytest.approx(
        0.25 * GIB / H100.link_rate(ranks=2, here=2), rel=0.01
    )
    middle = seconds.step_seconds(setup.with_(**mesh(pipe=4)), H100)
    assert middle.communication == pytest.approx(2 * found.communication, rel=0.01)
    assert found.exposed == pytest.approx(
        (found.compute + found.communication) / (1 - found.bubble_share)
    )


def test_double_precision_has_a_rate_of_its_own() -> None:
    setup = Setup(cost=cost_of("llama3_1b"), kind="single", precision="64-true")
    assert seconds.peak_flops(setup, H100) == H100.peak_flops["float64"]
    assert (
        Roofline(device=H100, rank=0, tf32=True).peak(torch.float64) == H100.peak_flops["float64"]
    )


@pytest.mark.parametrize(
    ("name", "micro", "recompute", "axes", "published"),
    # tokens per second and GPU that torchtitan published for compiled runs (docs/simulator.md)
    [
        ("llama3_8b", 2, "selective", {"shard": 8}, 6667),
        ("llama3_8b", 2, "selective", {"shard": 128}, 6514),
        ("llama3_8b", 12, "selective", {"shard": 8, "tensor": 8}, 4378),
        ("llama3_70b", 16, "every", {"shard": 32, "tensor": 8}, 597),
    ],
)
def test_published_throughput_lies_in_the_predicted_range(
    name, micro, recompute, axes, published
) -> None:
    setup = Setup(cost=cost_of(name), micro=micro, recompute=recompute, **mesh(**axes))
    low, high = (
        rate / setup.world_size for rate in seconds.step_seconds(setup, H100).units_per_second
    )
    assert low <= published <= high


LLAMA_13B = {"width": 5120, "layers": 40, "heads": 40, "ffn_hidden": 13824}
LLAMA_2 = {"vocab_size": 32000, "context": 4096}


@pytest.mark.parametrize(
    ("name", "changes", "micro", "recompute", "axes", "published"),
    [  # tokens per second and A100 of eager runs, with their sources in docs/planner.md
        ("llama3_8b", {}, 1, "selective", {"shard": 64}, 2973),
        ("llama3_70b", {}, 1, "every", {"shard": 64}, 331),
        ("llama2_7b", LLAMA_13B, 2, "none", {"shard": 64}, 2162),
        ("llama3_70b", LLAMA_2, 2, "every", {"shard": 64}, 353),
        ("llama2_7b", {}, 2, "none", {"replicate": 16, "shard": 8}, 3760),
        ("llama2_7b", LLAMA_13B, 1, "none", {"replicate": 16, "shard": 8}, 1700),
        (
            "llama3_70b",
            {**LLAMA_2, "layers": 48, "ffn_hidden": 22016},
            8,
            "every",
            {"shard": 128},
            772,
        ),
        ("llama3_70b", LLAMA_2, 6, "every", {"shard": 128}, 380),
    ],
)
def test_throughput_on_a100_is_up_to_a_quarter_above_the_range(
    name, changes, micro, recompute, axes, published
) -> None:
    setup = Setup(cost=cost_of(name, **changes), micro=micro, recompute=recompute, **mesh(**axes))
    low, high = (
        rate / setup.world_size for rate in seconds.step_seconds(setup, A100).units_per_second
    )
    assert low <= published <= 1.25 * high


def test_recomputation_trades_seconds_for_memory() -> None:
    setups = [
        Setup(cost=cost_of("llama3_8b"), recompute=n, **mesh(shard=8))
        for n in ("none", "selective", "every")
    ]
    peaks = [memory.peak(setup).total_bytes for setup in setups]
    times = [seconds.step_seconds(setup, H100).compute for setup in setups]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"), [(1, 2 + 14 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)
def test_zero_shards_what_its_stage_says(stage: int, bytes_per_parameter: float) -> None:
    cost = cost_of("llama3_8b")
    found = memory.peak(Setup(cost=cost, kind="deepspeed", stage=stage, world_size=8))
    assert found.state_bytes == pytest.approx(bytes_per_parameter * cost.parameters)


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"), [(1, 4 + 16 / 8), (2, 4 + 16 / 8), (3, 20 / 8)]
)
def test_zero_in_fp32_copies_weights(stage: int, bytes_per_parameter: float) -> None:
    cost = cost_of("llama3_8b")
    setup = Setup(cost=cost, kind="deepspeed", stage=stage, world_size=8, precision="32-true")
    assert memory.peak(setup).state_bytes == pytest.approx(bytes_per_parameter * cost.parameters)


def test_zero_1_holds_whole_gradients_only_while_they_accumulate() -> None:
    cost = cost_of("llama3_8b")
    setup = Setup(cost=cost, kind="deepspeed", stage=1, world_size=8, accumulate=2)
    assert memory.peak(setup).state_bytes == pytest.approx((4 + 12 / 8) * cost.parameters)


def test_zero_3_keeps_the_last_weights_from_forward_to_backward() -> None:
    cost = cost_of("llama3_1b")
    setup = Setup(cost=cost, kind="deepspeed", stage=3, world_size=8)
    weights, bucket = 2 * cost.parameters, 2 * memory.DEEPSPEED_BUCKET
    gathered = max(
        memory.peak(setup.with_(micro=n)).bytes_by_kind.get("gathered", 0) for n in (1, 8)
    )
    assert gathered == pytest.approx(2 * memory.DEEPSPEED_KEPT + bucket, rel=0.1)
    seconds_3, seconds_2 = (
        seconds.step_seconds(setup.with_(stage=stage), H100).communication for stage in (3, 2)
    )
    assert seconds_3 / seconds_2 == pytest.approx(
        (3 * weights - 2 * memory.DEEPSPEED_KEPT) / (3 * weights)
    )


def test_compute_optimal_sizes_are_chinchillas() -> None:
    best = budget.optimum(5.76e23)
    assert (best.parameters, best.tokens) == pytest.approx((67e9, 1.43e12), rel=0.01)
    assert budget.optimum(1.21e20).parameters == pytest.approx(1e9, rel=0.05)  # table 3
