"""Bytes that a rank sends in one optimizer step, counted from its collectives."""

# pyright: reportPrivateImportUsage=false
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from armature.planning.simulation.meter import kind_of


class CollectiveCounter(TorchDispatchMode):
    """Record the kind and bytes of each collective.

    The bytes are those of the reduced or broadcast tensor, of the gathered one, of all that a rank
    puts into an all-to-all, and of what it sends to another rank. Receives are not recorded: their
    senders count them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again as its collectives
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace or func.namespace == "_dtensor":
            kind = kind_of(func)
            if kind is not None:
                # c10d writes an all-to-all's results to its first argument
                given = (
                    args[1]
                    if func.__name__.startswith("alltoall")
                    else args[0]
                    if kind == "all_to_all"
                    else None
                )
                tensors = tree_leaves((args, kwargs, result) if given is None else given)
                sizes = [
                    t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)
                ]
                self.collectives.append(
                    {"kind": kind, "bytes": max(sizes) if given is None else sum(sizes)}
                )
        return result
