"""Units: what is sharded over data ranks, and gathers its weights in its own forward.

All other weights stay whole on every rank, as under ddp: users' code sees plain tensors.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchmetrics import Metric, MetricCollection

from armature.models.plan import Plan
from armature.parallel.gradients import local_part

LISTS = (nn.ModuleList, nn.ModuleDict)  # whose children are blocks
LEAVES = (nn.Linear, nn.Embedding)
# the last is nn.MultiheadAttention's, which never calls it
_KEPT = (Metric, MetricCollection, torch.jit.ScriptModule, NonDynamicallyQuantizableLinear)


@dataclass(frozen=True)
class Units:
    """How a model is sharded.

    Attributes:
        modules: each a list of modules that are gathered together, in the order of their forwards.
        of_model: weights of several leaves (an embedding tied to the head), which the model's own
            forward gathers.
        whole: all weights that are not sharded.
    """

    modules: list[list[nn.Module]]
    of_model: set[nn.Parameter]
    whole: set[nn.Parameter]


def find(
    model: nn.Module,
    plan: Plan | None,
    *,
    min_num_params: int,
    listed: bool = False,
    shared: Collection[Tensor] = (),
) -> Units:
    """Return the units of a model: the plan's blocks, consecutive ones together until they have
    `min_num_params`; without a plan the modules in a ModuleList or ModuleDict, and the innermost
    ones of a Sequential; and every other Linear and Embedding, and end of the plan.

    What has fewer parameters is no unit. A weight stays whole if it is also used outside of its
    unit, if a hook is registered on it, or if FSDP cannot shard it.

    Args:
        listed: the model itself is in a ModuleList or ModuleDict.
        shared: weights that are used outside of the model, too.
    """
    found = (
        [[module] for module in _without_plan(model, min_num_params, listed=listed)]
        if plan is None
        else _of_plan(model, plan, min_num_params)
    )
    users: dict[nn.Parameter, set[int]] = {}
    inside = {part: i for i, unit in enumerate(found) for each in unit for part in each.modules()}
    unfit: set[Any] = {*shared}
    for part in model.modules():
        for param in part.parameters(recurse=False):
            users.setdefault(param, set()).add(inside.get(part, -1))
            if not _fits(part, param):
                unfit.add(param)
    leaves = {i for i, unit in enumerate(found) if isinstance(unit[0], LEAVES)}
    tied = {param for param, places in users.items() if len(places) > 1}
    of_model = {param for param in tied - unfit if users[param] <= leaves}
    own = {
        param: i
        for param, (i, *others) in users.items()
        if i >= 0 and not others and param not in unfit
    }
    kept = {*own.values()} - {i for param in of_model for i in users[param]}
    modules = [unit for i, unit in enumerate(found) if i in kept]
    sharded = of_model | {param for param, i in own.items() if i in kept}
    return Units(modules, of_model, {*users} - sharded)


def _of_plan(model: nn.Module, plan: Plan, min_num_params: int) -> list[list[nn.Module]]:
    blocks = [*model.get_submodule(plan.blocks).children()]
    first, last = (
        [part for end in ends if (part := getattr(model, end)) is not None]  # else another stage's
        for ends in (plan.first, plan.last)
    )
    inside = {part for each in (*first, *blocks, *last) for part in each.modules()}
    leaves = [
        each
        for each in model.modules()
        if isinstance(each, LEAVES) and each not in inside and not isinstance(each, _KEPT)
    ]

    def large(parts: list[nn.Module]) -> list[list[nn.Module]]:
        return [[each] for each in parts if 0 < size(each) >= min_num_params]

    return large(first) + _together(blocks, min_num_params) + large([*leaves, *last])


def _together(blocks: list[nn.Module], min_num_params: int) -> list[list[nn.Module]]:
    """Return lists of consecutive blocks of at least `min_num_params`, or [] if all have fewer."""
    if size(*blocks) < max(1, min_num_params):
        return []
    units: list[list[nn.Module]] = []
    for block in blocks:
        if units and size(*units[-1]) < min_num_params:
            units[-1].append(block)
        else:
            units.append([block])
    if len(units) > 1 and size(*units[-1]) < min_num_params:
        units[-2:] = [units[-2] + units[-1]]
    return units


def _without_plan(
    module: nn.Module, min_num_params: int, *, listed: bool, in_sequence: bool = False
) -> Iterator[nn.Module]:
    if size(module) < max(1, min_num_params) or isinstance(module, _KEPT):
        return
    calls = type(module).forward is not nn.Module.forward
    inside = [
        unit
        for child in (module.children() if not (listed and calls) else ())
        for unit in _without_plan(
            child,
            min_num_params,
            listed=isinstance(module, LISTS),
            in_sequence=isinstance(module, nn.Sequential),
        )
    ]
    yield from inside
    if calls and not inside and (listed or in_sequence or isinstance(module, LEAVES)):
        yield module


def size(*modules: nn.Module) -> int:
    """Return the number of parameters on one rank of the tensor axis."""
    return sum(local_part(param).numel() for module in modules for param in module.parameters())


def _fits(owner: nn.Module, param: nn.Parameter) -> bool:
    """Return whether FSDP can shard a weight. Hooks, which the strategies give those with sparse
    gradients, would be lost, and so would the rows that an embedding with `max_norm` shortens in
    its forward.
    """
    hooked = param._backward_hooks or param._post_accumulate_grad_hooks
    shaped = param.ndim > 0 and param.numel() > 0 and param.is_contiguous()
    shortened = getattr(owner, "max_norm", None) is not None
    return shaped and not (hooked or shortened)


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter that has several, as if the embedding's weight is
    the head's.
    """
    groups: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        groups.setdefault(param, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ranks with different samples hold parts of a tensor."""
    return isinstance(tensor, DTensor) and crosses_data(tensor.device_mesh)


def crosses_data(mesh: DeviceMesh) -> bool:
    """Return whether ranks of a mesh have different samples: those of a tensor axis alone have the
    same.
    """
    return not {*(mesh.mesh_dim_names or ("data",))} <= {"tensor"}
