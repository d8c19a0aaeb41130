"""Whole weights of sharded modules: for users' code, and as files of pretrained ones hold them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def reshard(model: nn.Module) -> None:
    """Let the next forward of each unit gather weights as they are now."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within this context all weights inside are ordinary tensors; see `armature.whole_weights`."""
    reshard(module)  # else a forward's copy would be changed
    held = [
        (part, name, param)
        for part in module.modules()
        for name, param in part._parameters.items()
        if isinstance(param, DTensor)
    ]
    ordinary: dict[DTensor, nn.Parameter] = {}  # tied ones stay tied
    for part, name, param in held:
        if param not in ordinary:
            full = nn.Parameter(whole(param.detach()).clone(), requires_grad=param.requires_grad)
            full.grad = whole(param.grad)
            ordinary[param] = full
        part._parameters[name] = ordinary[param]
    try:
        with _of_engine(module):
            yield
    finally:
        with torch.no_grad():
            for part, name, param in held:
                part._parameters[name] = param  # pyright: ignore[reportArgumentType]
            for param, full in ordinary.items():
                param.copy_(sharded_like(param, full.detach()))
                param.grad = sharded_like(param, full.grad)


@contextmanager
def _of_engine(module: nn.Module) -> Iterator[None]:
    """The same for weights of ZeRO-3: a rank has a part of each, and of that an fp32 copy."""
    held: list[Any] = [param for param in module.parameters() if hasattr(param, "ds_id")]
    if not held:
        yield
        return
    from deepspeed import utils, zero

    with zero.GatheredParameters(held, modifier_rank=0):
        before = [param.detach().clone() for param in held]
        yield
        for param, old in zip(held, before, strict=True):
            # it is trained, and the engine is set up
            trained = param.requires_grad and hasattr(param, "_z3_optimizer")
            if trained and not torch.equal(param, old):
                exact: Any = utils.safe_get_full_fp32_param(param)  # 16 bits round it
                set_full(param, exact.where(param == old, param.detach().float()))


def set_full(param: Any, value: Tensor, key: str | None = None) -> None:
    """Set this rank's part of a weight that DeepSpeed's engine steps, or of its state of a key,
    from the whole.
    """
    from deepspeed import utils

    set_weight, set_state = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
    if hasattr(param, "ds_id"):  # these two fail where the last rank's part is padded
        set_weight, set_state = (
            utils.safe_set_local_fp32_param,
            utils.safe_set_local_optimizer_state,
        )
        size, rank = param.ds_tensor.ds_numel, dist.get_rank(param.ds_process_group)
        part = value.flatten()[size * rank : size * (rank + 1)]
        value = nn.functional.pad(part, (0, size - part.numel()))
    if key is None:
        set_weight(param, value)
    else:
        set_state(param, value, key)


def whole(value: Any) -> Any:
    """Return the whole of a tensor, gathered by all ranks, or another value itself."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_like(target: Any, value: Any) -> Any:
    """Return this rank's part of a whole tensor if `target` is sharded, or the value itself if they
    do not fit.

    No communication: every rank has the whole tensor, and all have the same.
    """
    if (
        not isinstance(target, DTensor)
        or isinstance(value, DTensor)
        or not isinstance(value, Tensor)
        or value.shape != target.shape  # load_state_dict names it
    ):
        return value
    value = value.to(target.device, target.dtype)
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def accept(model: nn.Module) -> None:
    """Let `load_state_dict` of a sharded model, and of its parts, take whole weights."""
    for part in model.modules():
        if any(isinstance(param, DTensor) for param in part.parameters(recurse=False)):
            part.register_load_state_dict_pre_hook(_shard)


def _shard(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        if (key := f"{prefix}{name}") in state_dict:
            state_dict[key] = sharded_like(param, state_dict[key])
