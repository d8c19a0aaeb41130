"""Parameter groups: which parameters are decayed, and which are the hidden matrices that Muon
orthogonalizes.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from armature.models.adapters import is_adapter
from armature.models.plan import Plan


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return up to four groups: hidden matrices, stacks of them, other matrices, and the rest
    without weight decay.

    Hidden matrices are the two-dimensional parameters inside the model's blocks. Their group has
    `hidden=True`, and the model's `width` if it has one. So has the group of stacks: the
    three-dimensional parameters of modules that say `stacked = True` (`models/mixture/experts.py`),
    which may be sharded over ranks of their own. Its key `stacked` keeps it apart from the other
    group in checkpoints, which tell groups by their hyperparameters. The rest are norms, biases and
    positions: parameters with one dimension or such a name. Names and numbers of dimensions decide,
    never the shape of a rank's shard, so groups are the same under every layout. Adapters are
    matrices of no such kind: Muon would take their small rank for that of the change.
    """
    hidden, stacks, matrices, vectors = [], [], [], []
    stacked = {
        param
        for module in model.modules()
        if getattr(module, "stacked", False)
        for param in module.parameters()
    }
    plan = getattr(model, "plan", None)
    blocks = plan.blocks if isinstance(plan, Plan) else "blocks"
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if param.ndim < 2 or name.rsplit(".", 1)[-1] in ("bias", "position"):
            vectors.append(param)
        elif param.ndim == 2 and name.startswith(f"{blocks}.") and not is_adapter(name):
            hidden.append(param)
        elif param.ndim == 3 and param in stacked:
            stacks.append(param)
        else:
            matrices.append(param)
    groups: list[dict[str, Any]] = [
        {"params": hidden, "hidden": True, "width": getattr(model, "width", None)},
        {"params": stacks, "hidden": True, "width": getattr(model, "width", None), "stacked": True},
        {"params": matrices, "hidden": False},
        {"params": vectors, "hidden": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def transferred_rates(
    groups: Iterable[dict[str, Any]],
    *,
    lr: float,
    weight_decay: float,
    base_width: int | None,
    power: float,
) -> list[dict[str, Any]]:
    """Return the groups, with the rate of hidden matrices times (base_width / width) ** power;
    None: unchanged.

    The decay per step, rate × decay, does not change. Embedding, head and vectors keep the rate.

    Raises:
        ValueError: for a model that has no attribute `width`.
    """
    groups = list(groups)
    if base_width is None:
        return groups
    if any(group["hidden"] and not group["width"] for group in groups):
        raise ValueError(
            f"optimizer.base_width={base_width} needs the model's width: give the model an "
            "attribute `width`, or type optimizer.base_width=null."
        )
    factors = [
        (base_width / group["width"]) ** power if group["hidden"] else 1.0 for group in groups
    ]
    return [
        group
        | {"lr": lr * factor, "weight_decay": group.get("weight_decay", weight_decay) / factor}
        for group, factor in zip(groups, factors, strict=True)
    ]
