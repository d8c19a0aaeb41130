"""Parallelize a model over a mesh as its plan says. All kinds of parallelism meet here, in one fixed order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from armature.models.plan import Plan, plan_beside
from armature.parallel import blocks, initialization, pipeline, tensor, ties
from armature.parallel.gradients import local_part
from armature.parallel.split import bubble_share

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `strategies.mesh.MeshStrategy`, whose constructor documents them, with every default resolved."""

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
class ParallelizedModel:
    """A model on this rank.

    Attributes:
        parts: one module per pipeline stage that this rank holds; without a pipeline, the model itself.
        bubble_share: share of a step that the pipeline's schedule leaves idle; 0 without a pipeline.
        runner: runs the pipeline's stages; None without a pipeline.
    """

    parts: list[nn.Module]
    bubble_share: float = 0.0
    runner: pipeline.Runner | None = None


def parallelize(
    model: nn.Module, plan: Plan | None, mesh: DeviceMesh, options: Options, *, device: torch.device, prefix: str
) -> ParallelizedModel:
    """Parallelize a model that is on the meta device, and initialize the weights that this rank holds.

    Args:
        mesh: with the axes pipe, replicate, shard and tensor.
        device: where the weights go, unless they are offloaded to the CPU.
        prefix: the prefix of the model's parameter names in the names that decide the initial weights ("model.").

    Raises:
        ConfigError: if the plan does not fit the model.
    """
    styles = tensor.match_styles(model, plan) if plan is not None else {}
    # 1. pipeline split: each rank keeps the blocks and ends of its stages
    stages = _split(model, plan, mesh["pipe"], options)
    parts = [model] if stages is None else stages.parts
    # 2. tensor: matrices, the vocabulary and its loss
    unshard = _apply_tensor_axis(model, parts, plan, styles, mesh["tensor"], options)
    # 3. float8, 4. activation checkpointing, 5. compile
    repeated = repeated_blocks(model, plan)
    blocks.convert_to_float8(repeated, float8=options.float8)
    blocks.checkpoint_activations(repeated, mode=options.activation_checkpointing)
    if options.compile == "block":
        blocks.compile_forward(repeated, mode=options.compile_mode)
    # 6. shard: units of blocks, and one unit for each end
    if mesh["replicate", "shard"].size() > 1:
        for part in parts:
            shard_parameters(part, plan, mesh=_data_mesh(mesh), options=options)
    # 7. materialize: memory is allocated only now, and only for this rank's weights
    meta_names = initialization.materialize(model, device=torch.device("cpu") if options.cpu_offload else device)
    # 8. initialize by name
    initialization.initialize_by_name(model, seed=options.seed, names=meta_names, prefix=prefix)
    # 9. pipeline schedule
    if stages is not None:
        return _schedule(model, stages, mesh["pipe"], options, device=device, unshard=unshard)
    if unshard is not None:
        tensor.gather_outputs(model, unshard)
    return ParallelizedModel(parts=parts)


def _split(model: nn.Module, plan: Plan | None, mesh: DeviceMesh, options: Options) -> pipeline.Stages | None:
    if mesh.size() == 1:
        return None
    assert plan is not None
    return pipeline.split(
        model, plan, rank=mesh.get_local_rank(), ranks=mesh.size(), schedule=options.schedule,
        block_counts=options.stages,
    )  # fmt: skip


def _apply_tensor_axis(
    model: nn.Module,
    parts: list[nn.Module],
    plan: Plan | None,
    styles: dict[str, str],
    mesh: DeviceMesh,
    options: Options,
) -> Callable[[Tensor], Tensor] | None:
    """Return a function that unshards the model's outputs, or None if they are not sharded."""
    if mesh.size() == 1:
        return None
    sequence_parallel = options.sequence_parallel and plan is not None and plan.sequence is not None
    tensor.shard_modules(model, styles, mesh=mesh, sequence_parallel=sequence_parallel)
    if "logits" not in styles.values():
        return None
    unshard = tensor.shard_loss(model, mesh=mesh)
    for part in parts:
        part.__dict__["loss"] = model.loss
    return unshard


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for fully_shard: two axes replicate the shards too (HSDP), one axis only shards."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


def _schedule(
    model: nn.Module,
    stages: pipeline.Stages,
    mesh: DeviceMesh,
    options: Options,
    *,
    device: torch.device,
    unshard: Callable[[Tensor], Tensor] | None,
) -> ParallelizedModel:
    runner = pipeline.Runner(
        model=model, stages=stages, group=mesh.get_group(), device=device, schedule=options.schedule,
        microbatches=options.microbatches, unshard_outputs=unshard or torch.clone,
    )  # fmt: skip
    pipeline.install_runner(model, runner)
    share = bubble_share(options.schedule, ranks=mesh.size(), microbatches=options.microbatches)
    return ParallelizedModel(parts=stages.parts, bubble_share=share, runner=runner)


def repeated_blocks(model: nn.Module, plan: Plan | None) -> list[nn.Module]:
    """Return the plan's blocks; without a plan, the whole model is the only block."""
    if plan is None:
        return [model]
    return list(model.get_submodule(plan.blocks).children())


def shard_parameters(model: nn.Module, plan: Plan | None, *, mesh: DeviceMesh, options: Options) -> None:
    """Apply fully_shard (FSDP2) to units of blocks, to each end, and to all remaining parameters.

    The unit that backward starts with, the last end or the remaining parameters, stays gathered after forward. Without
    gradients everything is resharded after forward: no backward follows, and the next forward would otherwise use the
    weights of this one.
    """
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": options.reshard_after_forward,
    }
    stay_gathered = {**arguments, "reshard_after_forward": False}
    sharded = [model]
    if plan is None:
        log.warning(
            "%s has no plan: it is sharded as one unit, so each rank gathers all of its weights at once. Write a "
            "plan.py beside it that names its blocks, and each rank gathers the weights of one block at a time.",
            type(model).__name__,
        )
    else:
        units = sharding_units(model, plan, min_num_params=options.min_num_params)
        for unit in units:
            fully_shard(unit, **arguments)
        sharded += [unit[0] for unit in units]
        _prefetch([unit[0] for unit in units], count=options.prefetch)
        if units and not ties.find(model):
            for ends, kwargs in ((plan.first, arguments), (plan.last, stay_gathered)):
                modules = [module for end in ends if (module := getattr(model, end)) is not None]
                if modules:
                    fully_shard(modules, **kwargs)
                    sharded.append(modules[0])
    fully_shard(model, **stay_gathered)

    def reshard_without_grad(*_: Any) -> None:
        if not torch.is_grad_enabled():
            for module in sharded:
                module.reshard()  # pyright: ignore[reportCallIssue]

    model.register_forward_hook(reshard_without_grad)


def _prefetch(units: list[nn.Module], *, count: int) -> None:
    """Let each unit gather the next `count` units during its forward; FSDP2 itself gathers one ahead.

    Args:
        units: the first block of each unit.
    """
    for i, unit in enumerate(units):
        following = units[i + 1 : i + 1 + count]
        if count > 1 and following and isinstance(unit, FSDPModule):
            unit.set_modules_to_forward_prefetch(following)  # pyright: ignore[reportArgumentType]


def sharding_units(model: nn.Module, plan: Plan, *, min_num_params: int) -> list[list[nn.Module]]:
    """Return lists of consecutive blocks that are gathered together; no list if the model has at most one unit's size.

    Args:
        min_num_params: the least number of parameters in a unit, counted on one rank of the tensor axis.
    """

    def size(*modules: nn.Module) -> int:
        return sum(local_part(param).numel() for module in modules for param in module.parameters())

    if size(model) <= min_num_params:
        return []
    units: list[list[nn.Module]] = []
    for block in repeated_blocks(model, plan):
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
