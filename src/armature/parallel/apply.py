"""Divides a model over a mesh as its plan says. The one place where all kinds of parallelism meet, in a fixed order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from armature.models.plan import Plan, plan_beside
from armature.parallel import blocks, initialization, pipeline, tensor, ties
from armature.parallel.split import bubble_share

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the strategy was asked for; its constructor says what each one means."""

    seed: int
    schedule: str
    microbatches: int
    stages: list[int] | None
    sequence_parallel: bool
    activation_checkpointing: str | int
    compile: str
    reshard_after_forward: bool
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    cpu_offload: bool
    prefetch: int
    min_num_params: int
    compile_mode: str = "default"
    float8: bool | str = False


@dataclass
class Applied:
    """What has become of a model on this rank."""

    parts: list[nn.Module]
    bubble_share: float = 0.0
    runner: pipeline.Runner | None = None


def parallelize(
    model: nn.Module, plan: Plan | None, mesh: DeviceMesh, options: Options, *, device: torch.device, prefix: str
) -> Applied:
    """Divide a model that is on the meta device, and give it its weights: only what this rank holds of them.

    Args:
        prefix: what stands before the model's names in the names that decide its initial weights ("model.").

    Raises:
        ConfigError: where the plan does not fit the model.
    """
    pipe, shard, tensor_axis = mesh["pipe"], mesh["replicate", "shard"], mesh["tensor"]
    styles = tensor.matches(model, plan) if plan is not None else {}
    sequence = options.sequence_parallel and plan is not None and plan.sequence is not None
    applied = Applied(parts=[model])

    # 1. pipeline split: each rank keeps the blocks and ends of its stages
    stages = None
    if pipe.size() > 1:
        assert plan is not None
        stages = pipeline.split(
            model,
            plan,
            rank=pipe.get_local_rank(),
            ranks=pipe.size(),
            schedule=options.schedule,
            by_hand=options.stages,
        )
        applied.parts = stages.parts

    # 2. tensor: matrices, the vocabulary and its loss
    whole: Callable[[Tensor], Tensor] | None = None
    if tensor_axis.size() > 1:
        tensor.parallelize(model, styles, mesh=tensor_axis, sequence_parallel=sequence)
        if "logits" in styles.values():
            whole = tensor.divide_loss(model, mesh=tensor_axis)
            for part in applied.parts:
                part.__dict__["loss"] = model.loss

    # 3. float8, 4. activation checkpointing, 5. compile
    repeated = list(blocks_of(model, plan))
    blocks.to_float8(repeated, float8=options.float8)
    blocks.recompute(repeated, mode=options.activation_checkpointing)
    if options.compile == "block":
        blocks.compile_forward(repeated, mode=options.compile_mode)

    # 6. shard: units of blocks, and one for each end
    if shard.size() > 1:
        for part in applied.parts:
            shard_part(part, plan, mesh=shard if mesh["replicate"].size() > 1 else mesh["shard"], options=options)

    # 7. materialize: only now is there memory for weights, and only for this rank's
    meta_names = initialization.materialize(model, device=torch.device("cpu") if options.cpu_offload else device)

    # 8. initialize by name
    initialization.initialize_by_name(model, seed=options.seed, names=meta_names, prefix=prefix)

    # 9. pipeline schedule
    if stages is not None:
        applied.runner = pipeline.Runner(
            model=model, stages=stages, group=pipe.get_group(), device=device, schedule=options.schedule,
            microbatches=options.microbatches, whole_outputs=whole or torch.clone,
        )  # fmt: skip
        applied.bubble_share = bubble_share(options.schedule, ranks=pipe.size(), microbatches=options.microbatches)
        pipeline.pipelined(model, applied.runner)
    elif whole is not None:
        tensor.gather_when_asked(model, whole)
    return applied


def blocks_of(model: nn.Module, plan: Plan | None) -> list[nn.Module]:
    """The repeated blocks; the whole model is one where there is no plan."""
    if plan is None:
        return [model]
    return list(model.get_submodule(plan.blocks).children())


def shard_part(model: nn.Module, plan: Plan | None, *, mesh: DeviceMesh, options: Options) -> None:
    """fully_shard (FSDP2) on units of blocks, on each end, and on what is left.

    What backward begins with, the last end or what is left, stays gathered after forward. Where no backward follows,
    nothing does: else a later forward would find the weights of an earlier one.
    """
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": options.reshard_after_forward,
    }
    kept = {**arguments, "reshard_after_forward": False}
    sharded = [model]
    if plan is None:
        log.warning(
            "%s has no plan: it is sharded as one unit, so each rank gathers all of its weights at once. A plan.py "
            "beside it that names its blocks would keep one block's weights at a time.",
            type(model).__name__,
        )
    else:
        units = units_of(model, plan, min_num_params=options.min_num_params)
        for unit in units:
            fully_shard(unit, **arguments)
        heads = [unit[0] for unit in units]
        sharded += heads
        for i, head in enumerate(heads):
            ahead = heads[i + 1 : i + 1 + options.prefetch]
            if options.prefetch > 1 and ahead and isinstance(head, FSDPModule):
                head.set_modules_to_forward_prefetch(ahead)  # pyright: ignore[reportArgumentType]
        if units and not ties.find(model):
            for ends, keep in ((plan.first, False), (plan.last, True)):
                here = [module for end in ends if (module := getattr(model, end)) is not None]
                if here:
                    fully_shard(here, **(kept if keep else arguments))
                    sharded.append(here[0])
    fully_shard(model, **kept)

    def reshard_without_grad(*_: Any) -> None:
        if not torch.is_grad_enabled():
            for module in sharded:
                module.reshard()  # pyright: ignore[reportCallIssue]

    model.register_forward_hook(reshard_without_grad)


def units_of(model: nn.Module, plan: Plan, *, min_num_params: int) -> list[list[nn.Module]]:
    """Consecutive blocks that are gathered together; none where the whole model is no larger than one unit may be.

    Args:
        min_num_params: counted as they are on one rank of the tensor axis.
    """

    def size(*modules: nn.Module) -> int:
        held = (p.to_local() if isinstance(p, DTensor) else p for module in modules for p in module.parameters())
        return sum(part.numel() for part in held)

    if size(model) <= min_num_params:
        return []
    units: list[list[nn.Module]] = []
    for block in blocks_of(model, plan):
        if units and size(*units[-1]) < min_num_params:
            units[-1].append(block)
        else:
            units.append([block])
    if len(units) > 1 and size(*units[-1]) < min_num_params:
        rest = units.pop()
        units[-1].extend(rest)
    return units


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan next to the module that defines the model's class, or None if there is none."""
    return plan_beside(type(model).__module__)
