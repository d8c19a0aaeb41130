"""The layouts that a plan compares: strategies and sizes of the axes for a number of devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature.layout import STRATEGIES

RECOMPUTE = ("none", "selective", "every")
LONGEST = 8  # ranks along a tensor, context or pipe axis


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
    offloaded = _choice(
        "ZeRO-3, offloaded", "deepspeed_zero3_offload", 9,
        kind="deepspeed", stage=3, offload_optimizer=True, offload_parameters=True,
    )  # fmt: skip
    if world == 1:
        yield _choice("single", "single", 0, kind="single")
        yield offloaded
        return
    yield _choice("ddp", "ddp", 1, kind="ddp")
    yield _choice(f"fsdp {world}", "fsdp", 2, shard=world)
    words = "fsdp strategy.reshard_after_forward=false"
    name = f"fsdp {world}, weights stay gathered"
    yield _choice(name, words, 3, shard=world, reshard_after_forward=False)
    machines = {"replicate": num_nodes, "shard": devices}
    name, words = f"hsdp {num_nodes} × {devices}", f"hsdp strategy.shard={devices}"
    if num_nodes > 1 and devices > 1:
        yield _choice(name, words, 3, **machines)
    for axis in ("tensor", "context"):
        for size in _powers(min(devices, LONGEST), dividing=world):
            words = f"{'fsdp_tensor' if axis == 'tensor' else axis} strategy.{axis}={size}"
            yield _axes(words, 4, shard=world // size, **{axis: size})
    for size in _powers(min(devices, experts), dividing=devices):
        if experts % size:
            continue
        expert = f"strategy.expert={size}"
        yield _choice(
            f"fsdp {world}, expert {size}", f"expert {expert}", 4, shard=world, expert=size
        )
        if num_nodes > 1:
            words = f"hsdp strategy.shard={devices} {expert}"
            yield _choice(f"{name}, expert {size}", words, 4, **machines, expert=size)
    for pipe in _powers(LONGEST, dividing=world):
        shard, pieces = world // pipe, max(4, pipe)
        words = f"fsdp_pipeline strategy.pipe={pipe} strategy.shard={shard}"
        yield _axes(words, 5, pipe=pipe, shard=shard, microbatches=pieces)
        for tensor in _powers(min(devices, LONGEST), dividing=shard):
            words = f"3d strategy.pipe={pipe} strategy.tensor={tensor}"
            rest = shard // tensor
            yield _axes(words, 6, pipe=pipe, shard=rest, tensor=tensor, microbatches=pieces)
    words = "fsdp strategy.cpu_offload=true"
    yield _choice(f"fsdp {world}, offloaded", words, 8, shard=world, cpu_offload=True)
    for stage, words in ((1, "deepspeed_zero1"), (2, "deepspeed"), (3, "deepspeed_zero3")):
        yield _choice(f"ZeRO-{stage}", words, 7, kind="deepspeed", stage=stage)
    yield offloaded


def _choice(name: str, words: str, effort: int, *, kind: Any = "mesh", **options: Any) -> Choice:
    strategy = {
        "_target_": STRATEGIES[kind],
        "seed": "${seed}",
        "activation_checkpointing": "none",
        **options,
    }
    return Choice(name=name, words=f"strategy={words}", strategy=strategy, effort=effort)


def _axes(words: str, effort: int, **options: int) -> Choice:
    """Return a layout that is named after its axes."""
    sizes = {"pipe": options.get("pipe", 1), "fsdp": options["shard"]}
    sizes |= {axis: options.get(axis, 1) for axis in ("tensor", "context")}
    name = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return _choice(name, words, effort, **options)


def _powers(most: int, *, dividing: int) -> Iterator[int]:
    """Yield 2, 4, 8 … as far as they divide a number."""
    size = 2
    while size <= most and dividing % size == 0:
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
