"""The state of optimizers that keep more than torch's entries by weight: a checkpoint holds it as
their state dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.optim import Optimizer

from armature.checkpoint import directory, optimizers
from armature.errors import ConfigError

WHOLE = f"{directory.RESERVED}optimizer_state"  # in meta.pt, with its index
BUILT = "__built__"  # in such a state: the groups' settings when the optimizer was built
INNER = "__inner__"  # in such a state: those of the optimizers that it holds


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes the loss itself (LBFGS).

    Its state has no tensor per weight.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def is_saved_whole(optimizer: Any) -> bool:
    """Return whether a checkpoint holds an optimizer's state dict as it is, instead of its tensors
    by weight.

    A user's optimizer may save more than torch's entries (Lookahead's slow weights), steps others
    that it holds (SAM), or have state that belongs to no weight.
    """
    if not isinstance(optimizer, Optimizer):  # DeepSpeed's
        return needs_closure(optimizer)
    if needs_closure(optimizer) or inner(optimizer):
        return True
    if not all(
        isinstance(key, Tensor) and isinstance(entry, dict)
        for key, entry in optimizer.state.items()
    ):
        return True
    if type(optimizer).state_dict is Optimizer.state_dict:
        return False
    own = optimizer.state_dict()
    if not isinstance(own, Mapping) or own.keys() - {"state", "param_groups"}:
        return True
    return len(own.get("state", ())) != len(optimizer.state)  # it keeps its state elsewhere


def needs_whole_model(optimizer: Any) -> str:
    return (
        f"{type(optimizer).__name__} needs the whole model on every rank. Type strategy=single "
        "or strategy=ddp."
    )


def check(optimizer: Optimizer, names: Mapping[Tensor, str], *, held: Collection[str]) -> None:
    """Raise ConfigError if no checkpoint would hold what an optimizer steps, or its state.

    Args:
        names: of the parameters that the module holds.
        held: names in the module's state dict. It may leave out parameters that are frozen.
    """
    if hasattr(optimizer, "consolidate_state_dict"):
        raise ConfigError(
            f"configure_optimizers: {type(optimizer).__name__} divides its state over ranks by "
            "itself. Return the "
            "optimizer that it wraps, and type strategy=fsdp or strategy=deepspeed_zero1."
        )
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in names:
                raise ConfigError(
                    f"configure_optimizers: {type(optimizer).__name__} steps a tensor of size "
                    f"{tuple(param.shape)} (in "
                    f"its group {number}) that is no parameter of the module: no checkpoint would "
                    "hold it, and no "
                    "strategy would reduce its gradient. Make it an nn.Parameter and an attribute "
                    "of the module; keep "
                    "several modules or parameters in nn.ModuleDict, ModuleList, ParameterDict or "
                    "ParameterList."
                )
            if param.requires_grad and names[param] not in held:
                raise ConfigError(
                    f"configure_optimizers: {type(optimizer).__name__} trains {names[param]}, "
                    "which the module's "
                    "state_dict leaves out: no checkpoint would hold it. Let state_dict return it, "
                    "or freeze it "
                    "(requires_grad_(False)) in __init__ or configure_model."
                )


def inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that another one holds as attributes, or in lists and dicts of them."""
    found: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        several = (
            value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        )
        found |= {
            f"{name}.{place}": each
            for place, each in enumerate(several)
            if isinstance(each, Optimizer)
        }
        if isinstance(value, Optimizer):
            found[name] = value
    return found


def whole_state(optimizer: Optimizer, built: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return its state dict, with those of the optimizers it holds unless its own `state_dict`
    cares for them.

    Args:
        built: the settings of its groups when it was built.
    """
    own = {**optimizer.state_dict(), BUILT: [*built]}
    if type(optimizer).state_dict is Optimizer.state_dict:
        own[INNER] = {
            name: whole_state(each)
            for name, each in inner(optimizer).items()
            if each.state is not optimizer.state
        }
    return own


def load_whole(
    optimizer: Optimizer, saved: Mapping[str, Any], built: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Load what `whole_state` returned. Groups and states that optimizers share stay shared."""
    own = dict(saved)
    held, then = own.pop(INNER, {}), own.pop(BUILT, ())
    methods = (type(optimizer).state_dict, type(optimizer).load_state_dict)
    if methods == (Optimizer.state_dict, Optimizer.load_state_dict):
        _load_in_place(optimizer, own)
    else:
        optimizer.load_state_dict(own)
    for group, old, new in zip(optimizer.param_groups, then, built, strict=False):
        group.update(optimizers.settings_of(group | {optimizers.BUILT: old}, new))
    known = inner(optimizer)
    for name in held.keys() & known.keys():
        load_whole(known[name], held[name])


def _load_in_place(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict of torch's own into the groups and the state that there are.

    torch's method makes new ones, gives each tensor the type of its weight, and leaves what belongs
    to no weight on the CPU.
    """
    params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, params, strict=True))
    optimizer.state.clear()
    for key, entry in saved["state"].items():
        param, group = by_number.get(key, params[0])
        moved = move_data_to_device(entry, param.device)
        if key in by_number and "step" in entry and not optimizers.counts_on_device(group):
            moved["step"] = entry["step"]
        optimizer.state[param if key in by_number else key] = moved
    for group, new in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in new.items() if key != "params"})
