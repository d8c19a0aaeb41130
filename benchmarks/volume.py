"""Bytes that a rank sends in one optimizer step, counted from its collectives."""

# pyright: reportPrivateImportUsage=false
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {  # by the start of an operator's name
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
}


class CollectiveCounter(TorchDispatchMode):
    """Record the kind and bytes of each collective: bytes of the reduced tensor, or of the gathered one."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again as its collectives
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            name = func.__name__.lstrip("_")
            kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), None)
            if kind is not None:
                tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
                self.collectives.append({"kind": kind, "bytes": max(t.numel() * t.element_size() for t in tensors)})
        return result

    def save(self, file: Path) -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(self.collectives))
        os.replace(part, file)
