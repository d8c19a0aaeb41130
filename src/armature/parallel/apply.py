"""Parallelize a model over a mesh as its plan says.

All kinds of parallelism meet here, in one fixed order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from armature.errors import ConfigError
from armature.models.plan import Plan, plan_beside
from armature.parallel import (
    blocks,
    copies,
    dtensors,
    experts,
    initialization,
    pipeline,
    tensor,
    ties,
)
from armature.parallel import mesh as meshes
from armature.parallel.context import Positions
from armature.parallel.gathered import Gathered
from armature.parallel.gradients import local_part
from armature.parallel.split import Schedule, bubble_share

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `strategies.mesh.MeshStrategy`, whose constructor documents them, with every
    default resolved.

    Attributes:
        keep_last_gathered: keep the unit that backward starts with gathered after forward.
    """

    seed: int
    schedule: Schedule
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
    keep_last_gathered: bool = True
    compile_mode: str = "default"
    float8: bool | str = False
    expert: int = 1
    async_tensor: bool | str = False


@dataclass
class ParallelizedModel:
    """A model on this rank."""

    # one per pipeline stage that this rank holds; without a pipeline, the model itself
    parts: list[nn.Module]
    bubble_share: float = 0.0  # share of a step that the pipeline's schedule leaves idle
    runner: pipeline.Runner | None = None  # runs the pipeline's stages


def parallelize(
    model: nn.Module,
    plan: Plan | None,
    mesh: DeviceMesh,
    options: Options,
    *,
    device: torch.device,
    prefix: str,
    imported: Collection[str] = (),
    positions: Positions | None = None,
    expert_ranks: DeviceMesh | None = None,
    gathered: Gathered | None = None,
) -> ParallelizedModel:
    """Parallelize a model that is on the meta device, and initialize the weights that this rank
    holds.

    Args:
        device: where the weights go, unless they are offloaded to the CPU.
        prefix: the prefix of the model's parameter names in the names that decide the initial
            weights ("model.").
        positions: this rank's on the context axis, or None without one.
        expert_ranks: `mesh.expert_mesh`, if there is an expert axis.
        gathered: watches the units that are sharded.
        imported: parameters that get their values from files afterwards, by the model's own names.
    """
    styles, hooks = tensor.match_styles(model, plan) if plan is not None else {}, _head_hooks(model)
    pipe, tensor_axis = meshes.find_axis(mesh, "pipe"), meshes.find_axis(mesh, "tensor")
    data_mesh = meshes.data_mesh(mesh)  # two axes: HSDP
    parts, stages, unshard = [model], None, None
    # 1. pipeline split: each rank keeps the blocks and ends of its stages
    if pipe is not None:
        assert plan is not None
        stages = pipeline.split(
            model, plan, rank=pipe.get_local_rank(), ranks=pipe.size(), schedule=options.schedule,
            block_counts=options.stages,
        )  # fmt: skip
        parts = stages.parts
    # 2. context: before the tensor axis, which wraps what the embedding gets
    if positions is not None:
        if plan is None or not plan.context:
            raise ConfigError(
                f"strategy.context={positions.size}: {type(model).__name__} has no plan that names "
                "its attention in "
                "`context`. Write it in a plan.py next to the model's module, or type "
                "strategy=fsdp."
            )
        positions.divide(model, plan)
        if stages is None:
            positions.divide_calls(model)
    # 2. experts, on ranks of their own. Their weights are sharded here: what follows leaves them
    # alone
    spread = None
    if (
        plan is not None
        and plan.experts is not None
        and (options.expert > 1 or tensor_axis is not None)
    ):
        # all ranks make the mesh's groups together, also those of a stage without experts
        spread = (
            meshes.expert_mesh(mesh, expert=options.expert)
            if expert_ranks is None
            else expert_ranks
        )
        arguments = sharding_arguments(options)
        for holder in experts.find(model, plan.experts):
            experts.shard(holder, spread, loss_ranks=data_mesh.size(), **arguments)
    # 3. float8, which puts other Linears in place of a block's
    repeated = repeated_blocks(model, plan)
    blocks.convert_to_float8(repeated, float8=options.float8)
    # 4. tensor: matrices, the vocabulary and its loss
    local: dict[nn.Module, tensor.LocalWeights] = {}
    if tensor_axis is not None:
        divides = options.sequence_parallel and plan is not None and plan.sequence is not None
        local = tensor.shard_modules(
            model, styles, mesh=tensor_axis, sequence_parallel=divides, blocks=repeated
        )
        if divides:
            place = 0 if positions is None else positions.rank
            for part in parts:
                tensor.draw_apart(part, place * tensor_axis.size() + tensor_axis.get_local_rank())
        if "logits" in styles.values():
            unshard = tensor.shard_loss(model, mesh=tensor_axis)
            for part in parts:
                part.__dict__["loss"] = model.loss
    # 5. activation checkpointing, 6. compile. Its weights are shown to compiled code from outside,
    # but to a recomputation from inside
    compiles = options.compile == "block"
    if not compiles:
        for block, weights in local.items():
            weights.around(block)
    blocks.checkpoint_activations(repeated, mode=options.activation_checkpointing)
    if compiles:
        if tensor_axis is not None and tensor.overlaps(options.async_tensor, tensor_axis):
            blocks.overlap_collectives()
        blocks.compile_forward(repeated, mode=options.compile_mode)
        for block, weights in local.items():
            weights.around(block)
    # 7. shard: units of blocks, and one unit for each end
    # FSDP2 moves offloaded weights to the GPU, of one rank as well
    if data_mesh.size() > 1 or options.cpu_offload:
        if plan is None and data_mesh.size() > 1:
            _warn_of_no_plan(type(model).__name__)
        _refuse_scripted(model, prefix)
        for part in parts:
            shard_parameters(part, plan, mesh=data_mesh, options=options)
    elif spread is not None and stages is not None:
        # torch's schedules keep experts gathered until the end of a step's backward, if the stage
        # is an FSDP module
        for part in parts:
            fully_shard(part, mesh=spread["rest"], ignored_params=set(part.parameters()))
    if gathered is not None:
        for part in parts:
            gathered.watch(prefix.rstrip("."), part, staged=stages is not None)
    for head, ids in _head_hooks(model).items():
        head.layout_hooks = frozenset(ids) - frozenset(hooks[head])  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    # 8. materialize: memory is allocated only now, and only for this rank's weights
    weights_device = torch.device("cpu") if options.cpu_offload else device
    meta_names = initialization.materialize(model, device=weights_device, buffers_device=device)
    # 9. initialize by name
    initialization.initialize_by_name(
        model, seed=options.seed, names=meta_names.difference(imported), prefix=prefix
    )
    # 10. pipeline schedule
    if stages is None or pipe is None:
        if unshard is not None:
            tensor.gather_outputs(model, unshard)
        return ParallelizedModel(parts=parts)
    runner = pipeline.Runner(
        model=model,
        stages=stages,
        group=pipe.get_group(),
        device=device,
        schedule=options.schedule,
        microbatches=options.microbatches,
        unshard_outputs=unshard or torch.clone,
        positions=positions,
        data_ranks=data_mesh.size(),
    )
    pipeline.install_runner(model, runner)
    share = bubble_share(options.schedule, ranks=pipe.size(), microbatches=options.microbatches)
    return ParallelizedModel(parts=parts, bubble_share=share, runner=runner)


def _head_hooks(model: nn.Module) -> dict[nn.Module, list[int]]:
    """Return the ids of the hooks of each module that must know its strategy's from others
    (`decoder.loss.Head`).
    """
    return {
        module: module.hook_ids for module in model.modules() if hasattr(module, "layout_hooks")
    }  # pyright: ignore[reportReturnType]


def repeated_blocks(model: nn.Module, plan: Plan | None) -> list[nn.Module]:
    """Return the plan's blocks; without a plan, the whole model is the only block."""
    return [model] if plan is None else list(model.get_submodule(plan.blocks).children())


def shard_parameters(
    model: nn.Module, plan: Plan | None, *, mesh: DeviceMesh, options: Options
) -> None:
    """Apply fully_shard (FSDP2) to units of blocks, to each end, and to all remaining parameters.

    The unit that backward starts with, the last end or the remaining parameters, stays gathered
    after forward. It does not if a module has several models (a GAN, a teacher and a student): code
    between their forwards and backwards changes weights and `requires_grad`, and must find all of
    them sharded. Without gradients everything is resharded
    after forward: no backward follows, and the next forward would otherwise use the weights of this
    one.
    """
    arguments = {"mesh": mesh, **sharding_arguments(options)}
    stay_gathered = {**arguments, "reshard_after_forward": not options.keep_last_gathered}
    # by a tensor axis
    sharded, is_split = ([model], any(isinstance(param, DTensor) for param in model.parameters()))
    dtensors.watch_weights(model)
    dtensors.carry_hooks(model)
    # weights that must not be rounded to `param_dtype`: in one process they are not
    rounds = options.param_dtype is not None
    exact = [
        module for module in model.modules() if rounds and getattr(module, "full_precision", False)
    ]
    for module in exact:
        own = {**arguments, "mp_policy": MixedPrecisionPolicy(reduce_dtype=options.reduce_dtype)}
        fully_shard(module, **own)
        sharded.append(module)
    if plan is not None:
        units = sharding_units(model, plan, min_num_params=options.min_num_params)
        for unit in units:
            fully_shard(unit, **arguments)
        heads = [unit[0] for unit in units]
        sharded += heads
        for i, head in enumerate(heads):  # FSDP2 itself gathers one unit ahead
            following = heads[i + 1 : i + 1 + options.prefetch]
            if options.prefetch > 1 and following and isinstance(head, FSDPModule):
                head.set_modules_to_forward_prefetch(following)  # pyright: ignore[reportArgumentType]
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
    # a copy would call the first one's
    compiled = any("forward" in vars(module) for module in model.modules())
    if len(sharded) == 1 + len(exact) and not is_split and not compiled:
        for module in exact:
            copies.allow(module, lambda copied: None)  # the whole copy is sharded below
        # with it, the LightningModule has several models
        copied = replace(options, keep_last_gathered=False)
        copies.allow(model, partial(shard_parameters, plan=plan, mesh=mesh, options=copied))


def sharding_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments of fully_shard that all units share."""
    return {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype
        ),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": options.reshard_after_forward,
    }


def sharding_units(model: nn.Module, plan: Plan, *, min_num_params: int) -> list[list[nn.Module]]:
    """Return lists of consecutive blocks that are gathered together, or [] if the model has at most
    one unit's size.
    """

    def size(*modules: nn.Module) -> int:  # in parameters on one rank of the tensor axis
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
        units[-2:] = [units[-2] + units[-1]]
    return units


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan beside a model's class, or the one that the model makes itself."""
    plan = plan_beside(type(model).__module__)
    return model.plan if plan is not None and plan.from_instance else plan  # pyright: ignore[reportReturnType]


def _refuse_scripted(model: nn.Module, prefix: str) -> None:
    """Raise ConfigError if a part that TorchScript made has weights: nothing can replace them by
    their shards.
    """
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and next(part.parameters(), None) is not None:
            raise ConfigError(
                f"{prefix}{name}".rstrip(".")
                + ": torch.jit made this module and it has weights, which cannot be "
                "sharded. Train the module itself and script it afterwards, or type strategy=ddp."
            )


@cache
def _warn_of_no_plan(kind: str) -> None:
    log.warning(
        "%s has no plan: it is sharded as one unit, so each rank gathers all of its weights at "
        "once. Write a plan.py beside it that names its blocks, and each rank gathers the weights "
        "of one block at a time.",
        kind,
    )
