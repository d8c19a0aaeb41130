"""Tied parameters: one parameter under several names, such as the embedding's weight as the
head's.
"""

from __future__ import annotations

from torch import Tensor, nn

from armature.errors import ConfigError


def find(module: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter that has more than one name."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        groups.setdefault(param, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def require_one_parameter(module: nn.Module, *, layout: str) -> None:
    """Raise ConfigError if parameters share their memory but are several, as `a.data = b.data`
    leaves them.
    """
    groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in module.named_parameters():
        # others' memory is elsewhere, or none
        plain = type(param.data) is Tensor and param.device.type != "meta"
        if plain and param.numel():
            groups.setdefault(param.data_ptr(), []).append((name, param))
    for group in (group for group in groups.values() if len(group) > 1):
        (first, _), (second, _), *_ = group
        if any(param.requires_grad for _, param in group):  # frozen ones stay the same
            raise ConfigError(
                f"{type(module).__name__}: {first} and {second} share their memory, and {layout} "
                "would give each its "
                f"own. Assign the parameter, self.{second} = self.{first}, instead of its data; or "
                "type strategy=ddp."
            )


def restore(module: nn.Module, groups: list[list[str]]) -> None:
    """Tie parameters again that became separate when they were replaced.

    `groups`: from `find`, before.
    """
    for first, *others in groups:
        shared = module.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            own = module.get_parameter(other)
            if getattr(own, "placements", None) != getattr(shared, "placements", None):
                raise ValueError(
                    f"{first} and {other} are one parameter, but their tensor styles shard it "
                    "differently: "
                    "give both styles that shard the same dim in plan.py."
                )
            module.get_submodule(owner).register_parameter(name, shared)
