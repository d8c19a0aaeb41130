"""Tied parameters: one parameter under several names, such as the embedding's weight as the
head's.
"""

from __future__ import annotations

from torch import nn


def find(module: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter that has more than one name."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        groups.setdefault(param, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


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
