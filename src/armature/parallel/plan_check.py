"""Check a plan against the model itself, built on the meta device: no process, no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from armature.errors import ConfigError
from armature.models.plan import Plan
from armature.parallel import ties
from armature.parallel.split import stage_ownership_problems
from armature.parallel.tensor import match_styles


def problems(make: Callable[[], nn.Module], plan: Plan, sizes: Mapping[str, int]) -> list[str]:
    """Return where a plan does not fit its model: names that do not exist, matrices that an axis does not divide."""
    with torch.device("meta"):
        model = make()
    name = type(model).__name__
    if plan.from_instance:
        try:
            plan = model.plan  # pyright: ignore[reportAssignmentType]
        except ValueError as error:
            return [f"{error}."]
    try:
        blocks = model.get_submodule(plan.blocks)
    except AttributeError:
        return [f"The plan's blocks={plan.blocks!r} is no submodule of {name}: correct plan.py."]
    if not isinstance(blocks, nn.ModuleDict) and (sizes["pipe"] > 1 or not isinstance(blocks, nn.ModuleList)):
        return [f"The plan's blocks={plan.blocks!r} is a {type(blocks).__name__}; {name} needs an nn.ModuleDict there."]
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
            for names in ties.find(model)
            if len({_stage_part(name, plan) for name in names}) > 1
        ]
    if sizes["tensor"] > 1:
        try:
            styles = match_styles(model, plan)
        except ConfigError as error:
            return found + error.problems
        if not styles:
            found.append(
                f"strategy.tensor={sizes['tensor']}: no plan of {name} names tensor styles. Type strategy=fsdp."
            )
        found += _indivisible(model, styles, tensor=sizes["tensor"])
        counts = {each: getattr(model, each, None) for each in plan.divided}
        found += [
            f"strategy.tensor={sizes['tensor']} does not divide the model's {each}={count}. Type another "
            "strategy.tensor, or strategy=fsdp."
            for each, count in counts.items()
            if isinstance(count, int) and count % sizes["tensor"]
        ]
    return found


def _stage_part(name: str, plan: Plan) -> str:
    first = name.split(".")[0]
    return "first" if first in plan.first else "last" if first in plan.last else name.split(".")[1]


def _indivisible(model: nn.Module, styles: dict[str, str], *, tensor: int) -> list[str]:
    dims = {"column": 0, "column_gathered": 0, "logits": 0, "vocabulary": 0, "row": 1, "row_of_whole": 1}
    found = {}
    for name, style in styles.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        if style in dims and weight is not None and weight.shape[dims[style]] % tensor:
            dim, shape = dims[style], tuple(weight.shape)
            message = f"strategy.tensor={tensor} does not divide dim {dim} of {name}.weight {shape}, a {style}."
            found[style, shape] = message
    return list(found.values())
