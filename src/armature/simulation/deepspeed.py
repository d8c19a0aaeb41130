"""DeepSpeed's ZeRO by the formulas of its paper (Rajbhandari et al., 2020): its engine itself is
not simulated.

The step of the model is simulated in one process; state and communication are DeepSpeed's. With P
parameters of b bytes on N ranks and Adam, a rank holds

    stage 1   b P weights,     b P gradients until they are reduced in the last backward pass, then
                               b P / N
    stage 2   b P weights,     b P / N gradients
    stage 3   b P / N weights, b P / N gradients; weights of up to 100,000 elements stay whole, and
                               are not counted
    each      (4 + 8) P / N fp32 weights and optimizer state, also if b = 4

and gathers b P bytes (stage 3: in forward and in backward of each micro-batch, there without the
last weights, which stay gathered) and reduces b P bytes: below stage 3 by an all-reduce, which
sends twice what the paper's reduce-scatter does. Buckets have their full size, whatever the model.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from armature.data import batching
from armature.layout import Layout
from armature.planner import memory
from armature.planner.devices import Device
from armature.simulation.report import Report, Volume
from armature.simulation.roofline import Roofline

NOTE = (
    "DeepSpeed's engine is not simulated: held state and volume are by ZeRO's formulas for Adam, "
    "activations are those "
    "of one process."
)


def report(
    cfg: DictConfig, layout: Layout, *, rank: int, device: Device,
    simulate: Callable[[DictConfig, Mapping[str, float]], Report],
) -> Report:  # fmt: skip
    """Return the report of a rank under DeepSpeed.

    `simulate` reports a configuration of one process that counts shares of the bytes of some kinds.
    """
    ranks, options = layout.world_size, layout.options
    stage, width = options["stage"], 2 if "16" in str(cfg.trainer.precision) else 4
    micro_batches = batching.plan_batches(
        cfg.data.global_batch_size, cfg.data.micro_batch_size, ranks
    ).accumulate
    shares = {
        "parameters": 1 / ranks if stage == 3 else 1,
        "gradients": 1 if stage == 1 and micro_batches > 1 else 1 / ranks,
        "optimizer state": 4 / width / ranks,  # the state of one process has its weights' type
    }
    offloaded = ["gradients", "optimizer state"] * options["offload_optimizer"]
    offloaded += ["parameters"] * options["offload_parameters"]
    one = simulate(_single(cfg, layout), {**shares, **dict.fromkeys(offloaded, 0)})
    weights = float(one.parameters * width)
    held = {
        **held_bytes(one, stage=stage, ranks=ranks, width=width),
        **dict.fromkeys(offloaded, 0.0),
    }
    buckets, reuse = _sizes(options)
    kept = min(weights, reuse * width) if stage == 3 else 0.0
    copy = 0.0 if options["offload_optimizer"] else 4 * one.parameters / ranks
    more = {
        "communication": float(buckets * width),
        "gathered weights": kept,
        "optimizer state": copy,
    }
    by_kind = Counter(one.peak_by_kind) + Counter(more)
    peak = sum(by_kind.values())
    roofline = Roofline(device=device, rank=rank, tf32=True)
    volumes = []
    for kind, size in volume(weights, stage=stage, micro_batches=micro_batches, kept=kept):
        seconds = roofline.collective(kind, size, range(ranks))
        volumes.append(
            Volume(axis="world", kind=kind, ranks=ranks, calls=1, bytes=size, seconds=seconds)
        )
    return dataclasses.replace(
        one,
        rank=rank,
        world_size=ranks,
        axes={"data": ranks},
        held=held,
        peak=peak,
        peak_by_kind=dict(by_kind),
        peak_by_phase={
            phase: size + sum(more.values()) for phase, size in one.peak_by_phase.items()
        },
        allowance=memory.allowance_bytes(peak, ranks=ranks),
        volumes=volumes,
        samples_per_step=one.samples_per_step * ranks,
        notes=(*one.notes, NOTE),
        model_flops=None if one.model_flops is None else one.model_flops * ranks,
    )


def held_bytes(one: Report, *, stage: int, ranks: int, width: int) -> dict[str, float]:
    """Return bytes by kind on one rank when the optimizer's step begins, given what one process
    holds.
    """
    weights = float(one.parameters * width)
    # the state of one process has its weights' type
    to_fp32 = 4 * one.parameters / one.held["parameters"]
    state = 4 * one.parameters + to_fp32 * one.held["optimizer state"]
    return {
        "parameters": weights / (ranks if stage == 3 else 1), "gradients": weights / ranks,
        "optimizer state": state / ranks,
    }  # fmt: skip


def _sizes(options: Mapping[str, Any]) -> tuple[int, float]:
    """Return the elements of all buckets, and those of the weights that stay gathered from forward
    to backward.
    """
    typed = (options["config"] or {}).get("zero_optimization", {})
    bucket = typed.get("reduce_bucket_size", memory.DEEPSPEED_BUCKET)
    reuse = typed.get("stage3_max_reuse_distance", 2 * memory.DEEPSPEED_KEPT)
    # forward and backward pass them once each
    return bucket if options["stage"] == 3 else 2 * bucket, reuse / 2


def bucket_bytes(strategy: Any) -> int:
    """Return the bytes of the largest buffer in which DeepSpeed's engine reduces gradients at this
    moment.
    """
    buffers = [bucket.buffer for bucket in strategy._zero.ipg_buckets.values()]
    tensors = [
        each for buffer in buffers for each in (buffer if isinstance(buffer, list) else [buffer])
    ]
    return max((each.untyped_storage().nbytes() for each in tensors if each is not None), default=0)


def engine_bytes(strategy: Any) -> dict[str, int]:
    """Return the bytes by kind that DeepSpeed's engine holds on this rank in a real run, with its
    padding.
    """
    zero, params = strategy._zero, list(strategy.module.parameters())
    averaged = (getattr(zero, "averaged_gradients", None) or {}).values()
    states = [value for values in zero.optimizer.state.values() for value in values.values()]
    held = {
        "parameters": [params, [getattr(param, "ds_tensor", None) for param in params]],
        "gradients": [
            [param.grad for param in params],
            *averaged,
            [getattr(zero, "grad_partitions_flat_buffer", None)],
        ],
        "optimizer state": [strategy._flat(), states],
    }
    seen: set[int] = set()
    sizes = {}
    for kind, lists in held.items():
        tensors = [
            each for tensors in lists for each in tensors or () if isinstance(each, torch.Tensor)
        ]
        new = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
        }
        sizes[kind] = sum(size for storage, size in new.items() if storage not in seen)
        seen |= new.keys()
    return sizes


def volume(
    weights: float, *, stage: int, micro_batches: int, kept: float = 0.0
) -> list[tuple[str, float]]:
    """Return kind and bytes of the collectives of a step.

    `weights`: bytes of all, of which `kept` stay gathered.
    """
    if stage == 3:
        return [
            ("all_gather", (2 * weights - kept) * micro_batches),
            ("reduce_scatter", weights * micro_batches),
        ]
    # stage 2 has no room for unreduced gradients, so it reduces those of each micro-batch
    return [("all_gather", weights), ("all_reduce", weights * (micro_batches if stage == 2 else 1))]


def _single(cfg: DictConfig, layout: Layout) -> DictConfig:
    """Return the run of one rank alone, with weights of the type that the engine computes with."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    plain["strategy"] = {
        "_target_": "armature.strategies.single.SingleDevice",
        "seed": cfg.seed,
        "activation_checkpointing": layout.options["activation_checkpointing"],
    }
    plain["trainer"] |= {
        "devices": 1,
        "num_nodes": 1,
        "precision": cfg.trainer.precision.replace("mixed", "true"),
    }
    plain["data"]["global_batch_size"] //= layout.world_size
    return OmegaConf.create(plain)  # pyright: ignore[reportReturnType]
