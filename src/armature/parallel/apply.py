"""Parallelize a model over a mesh as its plan says.

All kinds of parallelism meet here, in one fixed order.
"""

import gc
import logging
import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils._pytree import tree_map

from armature.errors import ConfigError
from armature.models.plan import Plan, plan_beside
from armature.parallel import (
    blocks,
    experts,
    initialization,
    pipeline,
    tensor,
    units,
)
from armature.parallel import mesh as meshes
from armature.parallel.context import Positions
from armature.parallel.split import Schedule

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
    activation_checkpointing: str | float
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
    listed: bool = False,
    shared: Collection[nn.Parameter] = (),
) -> pipeline.Runner | None:
    """Parallelize a model that is on the meta device, and initialize the weights that this rank
    holds. Return what runs its stages, if there is a pipeline.

    Args:
        device: where the weights go, unless they are offloaded to the CPU.
        prefix: the prefix of the model's parameter names in the names that decide the initial
            weights ("model.").
        positions: this rank's on the context axis, or None without one.
        expert_ranks: `mesh.expert_mesh`, if there is an expert axis.
        listed, shared: see `units.find`.
        imported: parameters that get their values from files afterwards, by the model's own names.
    """
    styles = tensor.match_styles(model, plan) if plan is not None else {}
    pipe, tensor_axis = meshes.find_axis(mesh, "pipe"), meshes.find_axis(mesh, "tensor")
    data_mesh = meshes.data_mesh(mesh)  # two axes: HSDP
    parts, stages, unshard = [model], None, None
    before = {name: weakref.ref(param) for name, param in model.named_parameters()}
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
                "its attention in `context`. Write it in a plan.py next to the model's module, or "
                "type strategy=fsdp."
            )
        positions.divide(model, plan)
    # 2. experts, on ranks of their own. Their weights are sharded here: what follows leaves them
    # alone
    spread = None
    if plan is not None and plan.experts and (options.expert > 1 or tensor_axis is not None):
        # all ranks make the mesh's groups together, also those of a stage without experts
        spread = expert_ranks or meshes.expert_mesh(mesh, expert=options.expert)
        for name in tensor.matching(model, plan.experts):
            experts.shard(
                model.get_submodule(name),
                spread,
                loss_ranks=data_mesh.size(),
                **sharding_arguments(options),
            )
    # 3. float8, which puts other Linears in place of a block's
    repeated = repeated_blocks(model, plan)
    blocks.convert_to_float8(repeated, float8=options.float8)
    # 4. tensor: matrices, the vocabulary and its loss
    local: dict[nn.Module, tensor.LocalWeights] = {}
    divides, place = False, 0 if positions is None else positions.rank
    if tensor_axis is not None:
        divides = options.sequence_parallel and plan is not None and plan.sequence is not None
        local = tensor.shard_modules(
            model, styles, mesh=tensor_axis, sequence_parallel=divides, blocks=repeated
        )
        if divides:
            place = place * tensor_axis.size() + tensor_axis.get_local_rank()
        if "logits" in styles.values():
            unshard = tensor.shard_loss(model, mesh=tensor_axis)
            for part in parts:
                part.__dict__["loss"] = model.loss
    if divides or positions is not None:
        for part in parts:
            tensor.draw_apart(part, place)
    # 5. activation checkpointing, 6. compile. Its weights are shown to compiled code from outside,
    # but to a recomputation from inside
    compiles = options.compile == "block"
    if not compiles:
        for block, weights in local.items():
            weights.around(block)
    # compiled code knows no contexts
    contexts = {} if spread is None or compiles else {"context_fn": experts.counted_passes}
    blocks.checkpoint_activations(repeated, mode=options.activation_checkpointing, **contexts)
    if compiles:
        if tensor_axis is not None and tensor.overlaps(options.async_tensor, tensor_axis):
            blocks.overlap_collectives()
        blocks.compile_forward(repeated, mode=options.compile_mode)
        for block, weights in local.items():
            weights.around(block)
    # 7. shard: units. A stage is one with what is in none: torch's schedules steer it as a whole
    # FSDP2 moves offloaded weights to the GPU, of one rank as well
    if data_mesh.size() > 1 or options.cpu_offload:
        for part in parts:
            found = units.find(
                part, plan, min_num_params=options.min_num_params, listed=listed, shared=shared
            )
            if stages is not None:
                found = units.Units(found.modules, found.of_model | found.whole, set())
            elif plan is None:
                _warn_if_whole(
                    model, found.whole.difference(shared), min_num_params=options.min_num_params
                )
            if found.modules or found.of_model or spread is not None:
                shard_units(part, found, mesh=data_mesh, options=options)
    elif spread is not None and stages is not None:
        # torch's schedules keep experts gathered until the end of a step's backward, if the stage
        # is an FSDP module
        for part in parts:
            fully_shard(part, mesh=spread["rest"], ignored_params=set(part.parameters()))
    if stages is None:  # else some are another rank's
        _check_left_behind(model, before, prefix)
    before.clear()  # torch swaps no tensor that a weak reference watches
    # 8. materialize: memory is allocated only now, and only for this rank's weights
    meta_names = initialization.materialize(model, device=device, offloads=options.cpu_offload)
    # 9. initialize by name
    initialization.initialize_by_name(
        model, seed=options.seed, names=meta_names.difference(imported), prefix=prefix
    )
    # 10. pipeline schedule
    if stages is None or pipe is None:
        begin(model)
        if unshard is not None:
            tensor.gather_outputs(model, unshard)
        return None
    runner = pipeline.Runner(
        model=model,
        stages=stages,
        group=pipe.get_group(),
        device=device,
        schedule=options.schedule,
        microbatches=options.microbatches,
        unshard_outputs=unshard or torch.clone,
        data_ranks=data_mesh.size(),
    )
    model.forward = runner  # a wrapper would prefix parameter names
    return runner


def repeated_blocks(model: nn.Module, plan: Plan | None) -> list[nn.Module]:
    """Return the plan's blocks; without a plan, the whole model is the only block."""
    return [model] if plan is None else list(model.get_submodule(plan.blocks).children())


def shard_units(
    model: nn.Module, found: units.Units, *, mesh: DeviceMesh, options: Options
) -> None:
    """Apply fully_shard (FSDP2) to each unit, and to the model, which gathers units ahead.

    The unit that backward starts with stays gathered after forward. It does not if a module has
    several models (a GAN, a teacher and a student): code between their forwards and backwards
    changes weights and `requires_grad`, and must find all of them sharded.
    """
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": found.whole | found.of_model,
        **sharding_arguments(options),
    }
    stay_gathered = {**arguments, "reshard_after_forward": not options.keep_last_gathered}
    # weights that must not be rounded to `param_dtype`: in one process they are not
    exact = [
        part
        for unit in found.modules
        for module in unit
        for part in module.modules()
        if options.param_dtype is not None and getattr(part, "full_precision", False)
    ]
    for part in exact:
        own = {**arguments, "mp_policy": MixedPrecisionPolicy(reduce_dtype=options.reduce_dtype)}
        fully_shard(part, **own)
    for unit in found.modules:
        last = unit is found.modules[-1] and not found.of_model
        fully_shard(unit, **(stay_gathered if last else arguments))
    _gather_ahead(found.modules, options=options)
    if not isinstance(model, FSDPModule):
        # whole weights take the model's inputs as they are
        policy = replace(arguments["mp_policy"], cast_forward_inputs=bool(found.of_model))
        own = {**stay_gathered, "mp_policy": policy, "ignored_params": found.whole}
        fully_shard(model, **own)
    # what follows a unit is in bf16, too, under bf16-true or if the model gathers its own weights
    fp32 = any(param.dtype is torch.float32 for param in model.parameters())
    rounded = options.param_dtype if fp32 and not found.of_model else None
    for module in [*exact, *(unit[-1] for unit in found.modules), model]:
        module.register_forward_hook(partial(_own_outputs, rounded), prepend=True)
        module.register_forward_hook(experts.reshard_without_grad)
    found.of_model.clear()  # others took their places


def _own_outputs(dtype: torch.dtype | None, module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook of a unit before FSDP's own, which `x += y` drops if x is a view: the unit would
    have wrong gradients, or none of its weights in backward.

    Outside of autocast, as in users' hooks, what follows the unit may have whole weights of fp32.
    """

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype is dtype and not torch.is_autocast_enabled(value.device.type):
            value = value.float()
        if value.requires_grad:
            value = value if value._base is None else value.clone()
            value.register_hook(_refuse_graph)
        return value

    return tree_map(own, output)


def _refuse_graph(grad: Tensor) -> None:
    """Raise an error in a backward that is itself differentiated: a gradient of weights that comes
    after their unit's backward is lost in silence.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("gradient of a gradient")


def _gather_ahead(modules: list[list[nn.Module]], *, options: Options) -> None:
    """Let each unit gather those that follow it, forward and backward, with what is sharded on its
    own inside, such as experts.

    FSDP2 itself gathers one unit ahead, if the host runs ahead of the device: it does not where
    ranks of an expert axis wait for their counts.
    """
    if options.prefetch < 2 and options.expert == 1:
        return
    units = [
        [part for each in unit for part in each.modules() if isinstance(part, FSDPModule)]
        for unit in modules
    ]
    for i, (head, *_) in enumerate(units):
        following = units[i + 1 : i + 1 + options.prefetch]
        before = units[max(0, i - options.prefetch) : i]
        head.set_modules_to_forward_prefetch([*chain(*following)])
        head.set_modules_to_backward_prefetch([*chain(*reversed(before))])


def begin(model: nn.Module) -> None:
    """Let the model be the root of its units, also if a unit is called before the model."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()


def learn_gradient_types(model: nn.Module) -> None:
    """Let FSDP look again at which weights are trained: a unit that was all frozen has no type for
    its gradients.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule) and (group := part._get_fsdp_state()._fsdp_param_group):
            group._init_mp_dtypes()


def sharding_arguments(options: Options) -> dict[str, Any]:
    """Return the arguments of fully_shard that all units share."""
    return {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype
        ),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": options.reshard_after_forward,
    }


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan beside a model's class, or the one that the model makes itself."""
    plan = plan_beside(type(model).__module__)
    return model.plan if plan is not None and plan.from_instance else plan  # pyright: ignore[reportReturnType]


def _check_left_behind(
    model: nn.Module, before: dict[str, weakref.ref[nn.Parameter]], prefix: str
) -> None:
    """Raise ConfigError if something keeps weights that sharded ones have replaced: what it reads
    and writes there would no longer be the model's, in silence.
    """
    own = {None, *model.parameters()}
    if not all(held() in own for held in before.values()):
        # a constructor's frame, which save_hyperparameters leaves in a cycle, may hold the variable
        # of a loop over weights; the worker has frozen it
        gc.unfreeze()
        gc.collect()
    for name, held in before.items():
        if held() not in own:
            raise ConfigError(
                f"{prefix}{name}: an attribute, closure or callback keeps this weight as it was "
                "before it was sharded. What is read there stays as it is, and what is written is "
                "lost. Take weights from self.parameters() in configure_optimizers, on_fit_start "
                "or later; or type a larger strategy.min_num_params, below which weights stay "
                "whole, or strategy=ddp."
            )


def _warn_if_whole(
    model: nn.Module, params: Collection[nn.Parameter], *, min_num_params: int
) -> None:
    whole = sum(param.numel() for param in params)
    if whole >= max(min_num_params, units.size(model) / 2):
        log.warning(
            "%s: %.3g million parameters are in no ModuleList, ModuleDict, Sequential, large "
            "Linear or Embedding, so every rank holds all of them, as under ddp. Write a plan.py "
            "beside it that names its blocks.",
            type(model).__name__,
            whole / 1e6,
        )
