"""DeepSpeed's ZeRO by the formulas of its paper (Rajbhandari et al., 2020): its engine itself is not simulated.

The step of the model is simulated in one process; state and communication are DeepSpeed's. With P parameters of b bytes
on N ranks and Adam, a rank holds

    stage 1   b P weights, b P gradients,    (4 + 8) P / N fp32 weights and optimizer state, also if b = 4
    stage 2   b P weights, b P / N gradients, the same
    stage 3   b P / N weights and gradients,  the same; if b = 4, 8 P / N: its weights are the fp32 weights

and gathers b P bytes (stage 3: in forward and in backward of each micro-batch, there without the last KEPT weights) and
reduces b P bytes. Buckets have their full size, whatever the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from armature.data import batching
from armature.layout import Layout
from armature.planner import memory
from armature.planner.devices import Device
from armature.simulation.report import Report, Volume
from armature.simulation.roofline import Roofline

KEPT = 500_000_000  # weights that backward needs within 1e9 elements of their use (max_reuse_distance) stay gathered
NOTE = (
    "DeepSpeed's engine is not simulated: held state and volume are by ZeRO's formulas for Adam, activations are those "
    "of one process."
)


def report(
    cfg: DictConfig, layout: Layout, *, rank: int, device: Device, simulate: Callable[[DictConfig], Report]
) -> Report:
    """Return the report of a rank under DeepSpeed. `simulate` reports a configuration of one process."""
    ranks, options = layout.world_size, layout.options
    one = simulate(_single(cfg, layout))
    width = 2 if "16" in str(cfg.trainer.precision) else 4
    shared = options["stage"] == 3 and width == 4 and not options["offload_parameters"]
    held = held_bytes(one, stage=options["stage"], ranks=ranks, width=width, shared=shared)
    if options["offload_optimizer"]:
        held["optimizer state"] = held["gradients"] = 0.0
    if options["offload_parameters"]:
        held["parameters"] = 0.0
    bucket = float((1 if options["stage"] == 3 else 2) * memory.DEEPSPEED_BUCKET * width)
    kept = float(min(one.parameters, KEPT) * width) if options["stage"] == 3 else 0.0
    buffers = {"communication": bucket} | ({"gathered weights": kept} if kept else {})
    change = sum(held.values()) - sum(one.held.values()) + sum(buffers.values())
    roofline = Roofline(device=device, rank=rank, tf32=True)
    volumes = []
    batches = batching.plan_batches(cfg.data.global_batch_size, cfg.data.micro_batch_size, ranks)
    sent = volume(one.parameters * width, stage=options["stage"], micro_batches=batches.accumulate, kept=kept)
    for kind, size in sent:
        seconds = roofline.collective(kind, size, range(ranks))
        volumes.append(Volume(axis="world", kind=kind, ranks=ranks, calls=1, bytes=size, seconds=seconds))
    return dataclasses.replace(
        one, rank=rank, world_size=ranks, axes={"data": ranks}, held=held, peak=one.peak + change,
        peak_by_kind={**one.peak_by_kind, **held, **buffers},
        peak_by_phase={phase: size + change for phase, size in one.peak_by_phase.items()},
        allowance=memory.allowance_bytes(one.peak + change, ranks=ranks), volumes=volumes,
        samples_per_step=one.samples_per_step * ranks, notes=(*one.notes, NOTE),
        model_flops=None if one.model_flops is None else one.model_flops * ranks,
    )  # fmt: skip


def held_bytes(one: Report, *, stage: int, ranks: int, width: int, shared: bool) -> dict[str, float]:
    """Return bytes by kind on one rank, given what one process holds. `shared`: the weights are the fp32 weights."""
    weights = float(one.parameters * width)
    to_fp32 = 4 * one.parameters / one.held["parameters"]  # the state of one process has its weights' type
    state = (0 if shared else 4 * one.parameters) + to_fp32 * one.held["optimizer state"]
    return {
        "parameters": weights / (ranks if stage == 3 else 1),
        "gradients": weights / (ranks if stage >= 2 else 1),
        "optimizer state": state / ranks,
    }


def engine_bytes(strategy: Any) -> dict[str, int]:
    """Return the bytes by kind that DeepSpeed's engine holds on this rank in a real run, with its padding."""
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
        tensors = [each for tensors in lists for each in tensors or () if isinstance(each, torch.Tensor)]
        new = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        sizes[kind] = sum(size for storage, size in new.items() if storage not in seen)
        seen |= new.keys()
    return sizes


def volume(weights: float, *, stage: int, micro_batches: int, kept: float = 0.0) -> list[tuple[str, float]]:
    """Return kind and bytes of the collectives of a step; `weights`: bytes of all, of which `kept` stay gathered."""
    if stage == 3:
        return [("all_gather", (2 * weights - kept) * micro_batches), ("reduce_scatter", weights * micro_batches)]
    # stage 2 has no room for unreduced gradients, so it reduces those of each micro-batch
    return [("all_gather", weights), ("reduce_scatter", weights * (micro_batches if stage == 2 else 1))]


def _single(cfg: DictConfig, layout: Layout) -> DictConfig:
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    plain["strategy"] = {
        "_target_": "armature.strategies.single.SingleDevice",
        "seed": cfg.seed,
        "activation_checkpointing": layout.options["activation_checkpointing"],
    }
    plain["trainer"] |= {"devices": 1, "num_nodes": 1}
    plain["data"]["global_batch_size"] //= layout.world_size
    return OmegaConf.create(plain)  # pyright: ignore[reportReturnType]
