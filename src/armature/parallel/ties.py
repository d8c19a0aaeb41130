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
