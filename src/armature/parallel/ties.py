"""Parameters that one name shares with another, such as the head's weight with the embedding's."""

from __future__ import annotations

from torch import nn


def find(module: nn.Module) -> list[list[str]]:
    """Groups of names of one and the same parameter."""
    groups: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        groups.setdefault(param, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def restore(module: nn.Module, groups: list[list[str]]) -> None:
    """Tie again what became a parameter of its own when it was replaced.

    Raises:
        ValueError: where the two were divided in different ways.
    """
    for first, *others in groups:
        shared = module.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            own = module.get_parameter(other)
            if getattr(own, "placements", None) != getattr(shared, "placements", None):
                raise ValueError(
                    f"{first} and {other} are one parameter, but their tensor styles divide it differently."
                )
            module.get_submodule(owner).register_parameter(name, shared)
