"""Weights that somebody keeps beside a model, and that sharding replaces in it by others."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as L
from torch import Tensor, nn

from armature.parallel.copies import HOOKS, STATE_PREFIX

MAX_OBJECTS = 50_000  # that are searched
MAX_DEPTH = 6
OF_TORCH = ("_parameters", "_modules")  # dicts in which a module keeps its attributes
CLOSED = (
    Tensor,
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    L.Trainer,
    L.LightningDataModule,
)


def find(roots: Mapping[str, Any], weights: Mapping[nn.Parameter, str]) -> dict[str, str]:
    """Return where attributes of the roots, or what these hold, still have one of the `weights`,
    and its name.

    The search ends after MAX_OBJECTS objects, those that are near to a root first.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    waiting = deque((path, root, 0) for path, root in roots.items())
    while waiting and len(seen) < MAX_OBJECTS:
        path, value, depth = waiting.popleft()
        if isinstance(value, nn.Parameter) and value in weights:
            found.setdefault(path, weights[value])
        if isinstance(value, CLOSED) or value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if depth < MAX_DEPTH:
            waiting.extend((f"{path}{step}", part, depth + 1) for step, part in _parts(value))
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container or an object holds, and how it is written."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{'…' if isinstance(key, Tensor) else repr(key)}]", part
            if isinstance(key, Tensor):
                yield " (a key)", key
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, partial):
        yield from (("(…)", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f" (its variable {name})", _content(cell)) for name, cell in cells)
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from ((" (a default)", part) for part in defaults)
    for name, part in getattr(value, "__dict__", {}).items():
        if name in HOOKS or name.startswith(STATE_PREFIX):
            continue
        if name in OF_TORCH and isinstance(value, nn.Module):
            yield from ((f".{own}", each) for own, each in part.items())
        else:
            yield f".{name}", part


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def names_of(
    module: nn.Module, before: Iterable[tuple[str, nn.Parameter]]
) -> dict[nn.Parameter, str]:
    """Return those of the named parameters `before` that are no longer in the module."""
    present = set(module.parameters())
    return {param: name for name, param in before if param not in present}
