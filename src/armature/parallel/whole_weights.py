"""Whole weights, as a file of pretrained ones holds them, for modules that are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def sharded_like(target: Any, value: Any) -> Any:
    """Return this rank's part of a whole tensor if `target` is sharded, or the value itself if they
    do not fit.

    No communication: every rank has the whole tensor, and all have the same.
    """
    if (
        not isinstance(target, DTensor)
        or isinstance(value, DTensor)
        or not isinstance(value, Tensor)
    ):
        return value
    if value.shape != target.shape:
        return value  # load_state_dict names it
    value = value.to(target.device, target.dtype)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def accept(model: nn.Module) -> None:
    """Let `load_state_dict` of a sharded model, and of its parts, take whole weights."""
    for part in model.modules():
        # which takes no such hook; its weights are whole
        if not isinstance(part, torch.jit.ScriptModule):
            part.register_load_state_dict_pre_hook(_shard)


def _shard(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        if (key := f"{prefix}{name}") in state_dict:
            state_dict[key] = sharded_like(param, state_dict[key])
