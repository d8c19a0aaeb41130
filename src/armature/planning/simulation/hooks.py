"""What the meter must be told by torch's own code.

FSDP's buffers, DTensor's rehearsals, storages that are resized.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from armature.planning.simulation.meter import Meter

Function = Callable[..., Any]


def install(meter: Meter) -> None:
    """Wrap functions of torch, for the rest of this process."""
    for owner, name in ((DeviceMesh, "__init__"), (_MeshLayout, "remap_to_tensor")):
        wrap(owner, name, with_values)  # a mesh computes with tensors of ranks, which have values
    for name in ("foreach_all_gather", "foreach_reduce"):
        wrap(_fsdp_param_group, name, meter.during(None, "communication"))
    gathered = meter.during(None, "gathered weights")
    wrap(_fsdp_param.FSDPParam, "init_all_gather_outputs", gathered)
    wrap(_fsdp_param_group.FSDPParamGroup, "post_backward", lambda f: _noting_gradients(meter, f))
    # it runs each operator once on tensors of global size, to learn shapes
    wrap(ShardingPropagator, "_propagate_tensor_meta_non_cached", meter.pausing())
    # no dispatch mode sees it
    wrap(torch.UntypedStorage, "resize_", lambda f: _noting_sizes(meter, f))


def wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace a function by what `make` returns for it; a context manager returns one that runs in
    it.
    """
    setattr(owner, name, make(getattr(owner, name)))


def with_values(function: Function) -> Function:
    """Return a function that runs outside of the simulation: for what belongs to the host alone."""
    return _disable_current_modes()(function)


def _noting_sizes(meter: Meter, function: Function) -> Function:
    def call(storage: Any, size: Any) -> Any:
        result = function(storage, size)
        meter.resize(storage)
        return result

    return call


def _noting_gradients(meter: Meter, function: Function) -> Function:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(group, *args, **kwargs)
        for param in group.fsdp_params:
            if param.sharded_param.grad is not None:
                meter.own(param.sharded_param.grad, "gradients")
        return result

    return call
