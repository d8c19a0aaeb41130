"""Check a plan against the model itself, built on the meta device: no process, no memory."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from armature.errors import ConfigError
from armature.finetune.lora import Lora, LoraLinear
from armature.layout import Layout
from armature.models.plan import Plan
from armature.parallel.split import stage_ownership_problems
from armature.parallel.tensor import adapter_problem, match_styles, matching
from armature.parallel.units import tied_names


def problems(make: Callable[[], nn.Module], plan: Plan, sizes: Mapping[str, int]) -> list[str]:
    """Return where a plan does not fit its model: names that do not exist, matrices that an axis
    does not divide.
    """
    with torch.device("meta"):
        model = make()
    name = type(model).__name__
    if plan.from_instance:
        made: Plan | None = model.plan  # pyright: ignore[reportAssignmentType]
        if made is None or (made.no_tensor is not None and sizes["tensor"] > 1):
            why = f"{name} names no blocks. Type strategy=fsdp" if made is None else made.no_tensor
            return [f"strategy.tensor={sizes['tensor']}: {why}."] * (sizes["tensor"] > 1)
        plan = made
    try:
        blocks = model.get_submodule(plan.blocks)
    except AttributeError:
        return [f"The plan's blocks={plan.blocks!r} is no submodule of {name}: correct plan.py."]
    lists = nn.ModuleDict if sizes["pipe"] > 1 else nn.ModuleDict | nn.ModuleList | nn.Sequential
    if not isinstance(blocks, lists):
        return [
            f"The plan's blocks={plan.blocks!r} is a {type(blocks).__name__}; {name} needs an "
            "nn.ModuleDict there."
        ]
    found = [
        f"The plan's {which}={end!r} is no submodule of {name}: correct plan.py."
        for which, ends in (("first", plan.first), ("last", plan.last))
        for end in ends
        if not isinstance(getattr(model, end, None), nn.Module)
    ]
    if sizes["pipe"] > 1:
        found += stage_ownership_problems(model)
        found += [
            f"{' and '.join(names)} are one parameter, which two pipeline stages cannot share."
            for names in tied_names(model)
            if len({_stage_part(name, plan) for name in names}) > 1
        ]
    if sizes["context"] > 1:
        found += _context_problems(model, plan, context=sizes["context"])
    if sizes["tensor"] > 1:
        try:
            styles = match_styles(model, plan)
        except ConfigError as error:
            return found + error.problems
        found += _indivisible(model, styles, tensor=sizes["tensor"])
        counts = {each: getattr(model, each, None) for each in plan.divided}
        found += [
            f"strategy.tensor={sizes['tensor']} does not divide the model's {each}={count}. Type "
            "another strategy.tensor, or strategy=fsdp."
            for each, count in counts.items()
            if isinstance(count, int) and count % sizes["tensor"]
        ]
    return found


def _context_problems(model: nn.Module, plan: Plan, *, context: int) -> list[str]:
    name, found = type(model).__name__, []
    for pattern, style in plan.context.items():
        names = matching(model, pattern)
        if not names:
            found.append(
                f"The plan's context pattern {pattern!r} matches no module of {name}: correct "
                "plan.py."
            )
        weights = [each for each in names if [*model.get_submodule(each).parameters()]]
        if style != "part" and weights:
            found.append(
                f"The plan's context style {style!r} is for modules without weights, but "
                f"{weights[0]} has some."
            )
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        found.append(
            f"strategy.context={context}: {name} has BatchNorm, whose statistics are over all "
            "positions. Type strategy=fsdp, or take another norm."
        )
    return found


def adapter_problems(make: Callable[[], nn.Module], adapter: Lora, layout: Layout) -> list[str]:
    """Return why adapters do not fit a model, such as patterns without a match."""
    try:
        with torch.device("meta"):
            model = make()
    except Exception:
        # of another's model, whose constructor needs real tensors: the ranks build it
        return []
    try:
        adapter.add_to(model)
    except ConfigError as error:
        return error.problems
    if not any(param.requires_grad for param in model.parameters()):
        return [
            "task.adapter trains nothing. Type task.adapter.targets=null for all Linears in the "
            "blocks."
        ]
    adapted = [each for each in model.modules() if isinstance(each, LoraLinear)]
    most = max((min(each.in_features, each.out_features) for each in adapted), default=adapter.rank)
    if adapter.rank > most:
        return [
            f"task.adapter.rank={adapter.rank}: no adapted Linear has a rank above {most}. Type at "
            "most that."
        ]
    if layout.plan is None or layout.axes["tensor"] == 1:
        return []
    styles = match_styles(model, layout.plan)
    adapted = {
        styles[n] for n, m in model.named_modules() if isinstance(m, LoraLinear) and n in styles
    }
    return [problem for style in sorted(adapted) if (problem := adapter_problem(style))]


def _stage_part(name: str, plan: Plan) -> str:
    first = name.split(".")[0]
    return "first" if first in plan.first else "last" if first in plan.last else name.split(".")[1]


def _indivisible(model: nn.Module, styles: dict[str, str], *, tensor: int) -> list[str]:
    dims = {
        "column": 0,
        "column_gathered": 0,
        "logits": 0,
        "vocabulary": 0,
        "row": 1,
        "row_of_whole": 1,
    }
    found = {}
    for name, style in styles.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        if style in dims and weight is not None and weight.shape[dims[style]] % tensor:
            dim, shape = dims[style], tuple(weight.shape)
            message = (
                f"strategy.tensor={tensor} does not divide dim {dim} of {name}.weight "
                f"{shape}, a {style}."
            )
            found[style, shape] = message
    return list(found.values())
