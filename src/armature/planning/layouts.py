"""The layouts that a plan compares: strategies and sizes of the axes for a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature.layout import STRATEGIES
from armature.validation import checks

RECOMPUTE = ("none", "selective", "every")
LONGEST_TENSOR = 8  # ranks that share each matrix: the layer's messages grow with them
LONGEST_PIPE = 8
LONGEST_CONTEXT = 8  # ranks that share each sample


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout: its name, what to type for it, and the strategy group that results.

    `effort` orders layouts that do equally well: what has fewer parts to go wrong comes first.
    """

    name: str
    words: str
    strategy: Mapping[str, Any]
    effort: int


def choices(*, devices: int, num_nodes: int, experts: int = 1) -> Iterator[Choice]:
    """Yield the layouts of devices × machines that make sense for some model, with so many experts
    per block.
    """
    world = devices * num_nodes
    if world == 1:
        yield Choice(name="single", words="strategy=single", strategy=_target("single"), effort=0)
        yield _zero_offload()
        return
    yield Choice(name="ddp", words="strategy=ddp", strategy=_target("ddp"), effort=1)
    yield _mesh(f"fsdp {world}", "strategy=fsdp", {"shard": world}, 2)
    yield _mesh(
        f"fsdp {world}, weights stay gathered",
        "strategy=fsdp strategy.reshard_after_forward=false",
        {"shard": world, "reshard_after_forward": False},
        3,
    )
    if num_nodes > 1 and devices > 1:
        yield _mesh(
            f"hsdp {num_nodes} × {devices}", f"strategy=hsdp strategy.shard={devices}",
            {"replicate": num_nodes, "shard": devices}, 3,
        )  # fmt: skip
    for tensor in _powers(min(devices, LONGEST_TENSOR)):
        shard = world // tensor
        if world % tensor:
            continue
        if shard == 1:
            yield _mesh(f"tensor {tensor}", "strategy=tensor", {"shard": 1, "tensor": tensor}, 4)
        else:
            words = f"strategy=fsdp_tensor strategy.tensor={tensor}"
            yield _mesh(
                f"fsdp {shard} × tensor {tensor}", words, {"shard": shard, "tensor": tensor}, 4
            )
    for context in _powers(min(devices, LONGEST_CONTEXT)):
        if world % context == 0:
            shard = world // context
            words = f"strategy=context strategy.context={context}"
            name = f"fsdp {shard} × context {context}" if shard > 1 else f"context {context}"
            yield _mesh(name, words, {"shard": shard, "context": context}, 4)
    yield from _of_experts(experts, devices=devices, num_nodes=num_nodes)
    yield from _pipelines(world, devices)
    yield _mesh(
        f"fsdp {world}, offloaded",
        "strategy=fsdp strategy.cpu_offload=true",
        {"shard": world, "cpu_offload": True},
        8,
    )
    yield from _deepspeed()


def _of_experts(experts: int, *, devices: int, num_nodes: int) -> Iterator[Choice]:
    """Yield layouts whose tokens travel to experts within a machine."""
    world = devices * num_nodes
    for expert in _powers(min(devices, experts)):
        if devices % expert or experts % expert:
            continue
        words = f"strategy=expert strategy.expert={expert}"
        yield _mesh(f"fsdp {world}, expert {expert}", words, {"shard": world, "expert": expert}, 4)
        if num_nodes > 1:
            yield _mesh(
                f"hsdp {num_nodes} × {devices}, expert {expert}",
                f"strategy=hsdp strategy.shard={devices} strategy.expert={expert}",
                {"replicate": num_nodes, "shard": devices, "expert": expert}, 4,
            )  # fmt: skip


def _pipelines(world: int, devices: int) -> Iterator[Choice]:
    for pipe in _powers(min(world, LONGEST_PIPE)):
        if world % pipe:
            continue
        shard = world // pipe
        words = f"strategy=fsdp_pipeline strategy.pipe={pipe}" if shard > 1 else "strategy=pipeline"
        name = f"pipe {pipe} × fsdp {shard}" if shard > 1 else f"pipe {pipe}"
        yield _mesh(name, words, {"pipe": pipe, "shard": shard, "microbatches": max(4, pipe)}, 5)
        for tensor in _powers(min(devices, LONGEST_TENSOR)):
            if shard % tensor == 0:
                rest = shard // tensor
                yield _mesh(
                    f"pipe {pipe} × fsdp {rest} × tensor {tensor}",
                    f"strategy=3d strategy.pipe={pipe} strategy.tensor={tensor}",
                    {"pipe": pipe, "shard": rest, "tensor": tensor, "microbatches": max(4, pipe)},
                    6,
                )


def _deepspeed() -> Iterator[Choice]:
    for stage, words in ((1, "deepspeed_zero1"), (2, "deepspeed"), (3, "deepspeed_zero3")):
        options = {"stage": stage}
        yield Choice(
            name=f"ZeRO-{stage}",
            words=f"strategy={words}",
            strategy=_target("deepspeed", options),
            effort=7,
        )
    yield _zero_offload()


def _zero_offload() -> Choice:
    options = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
    words = "strategy=deepspeed_zero3_offload"
    return Choice(
        name="ZeRO-3, offloaded", words=words, strategy=_target("deepspeed", options), effort=9
    )


def _mesh(name: str, words: str, options: Mapping[str, Any], effort: int) -> Choice:
    return Choice(name=name, words=words, strategy=_target("mesh", options), effort=effort)


def _target(kind: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "_target_": STRATEGIES[kind],
        "seed": "${seed}",
        "activation_checkpointing": "none",
        **(options or {}),
    }


def _powers(most: int) -> Iterator[int]:
    size = 2
    while size <= most:
        yield size
        size *= 2


def applied(cfg: DictConfig, choice: Choice, *, devices: int, num_nodes: int) -> DictConfig:
    """Return a copy of the configuration under a layout."""
    changed = cfg.copy()
    OmegaConf.set_struct(changed, False)
    kept = {
        key: cfg.strategy[key]
        for key in ("compile", "compile_mode", "float8")
        if key in cfg.strategy
    }
    OmegaConf.update(changed, "strategy", {**kept, **choice.strategy}, merge=False)
    changed.trainer.devices, changed.trainer.num_nodes = devices, num_nodes
    return changed


def refusals(cfg: DictConfig) -> list[str]:
    """Return why a configuration's layout cannot run; [] if it can.

    DeepSpeed need not be installed here.
    """
    return [
        each for each in checks.layout_problems(cfg) if "deepspeed is not installed" not in each
    ]
