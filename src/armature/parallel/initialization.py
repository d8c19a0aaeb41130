"""Initial weights by parameter name and seed: the same model under every layout, whatever part a
rank holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from armature.errors import ConfigError
from armature.finetune import nf4
from armature.parallel import units


def generator_for(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def materialize(module: nn.Module, *, device: torch.device, offloads: bool = False) -> set[str]:
    """Allocate meta parameters on `device`, and move the others there.

    Return the names of those that were meta.

    `offloads`: those that are sharded over data ranks stay on the CPU, from which FSDP brings them
    to the device.
    """
    meta_names = {
        name for name, param in module.named_parameters(remove_duplicate=False) if param.is_meta
    }
    if buffers := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"Buffers {', '.join(buffers)} are on the meta device: make their values in forward "
            "instead."
        )

    def placed(tensor: Tensor) -> Tensor:
        # zeros: those that a checkpoint fills later are not drawn, and hooks may read them before
        place = torch.device("cpu") if offloads and units.is_sharded(tensor) else device
        return torch.zeros_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

    if not meta_names:
        module._apply(placed)
        return meta_names
    swap = torch.__future__.get_swap_module_params_on_conversion()
    # keeps parameters the same objects, and so tied
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(placed)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    for param in module.parameters():
        if param._backward_hooks:
            # registers them anew: torch's own record stayed behind
            param._backward_hooks = param._backward_hooks
    return meta_names


def initialize_by_name(
    module: nn.Module, *, seed: int, names: set[str] | None = None, prefix: str = ""
) -> None:
    """Initialize parameters through the `initialize_parameter` of the model that owns them.

    Only one unsharded parameter, in fp32 on the CPU, is in memory at a time.

    Args:
        names: the parameters of `module` to initialize; None: all.
        prefix: prefix of `module`'s parameter names in the names that seed the generators. A
            LightningModule's `model` has the prefix "model.", so that the same seed gives the same
            weights in a bare loop and under a strategy.
    """
    owners = {
        name: owner
        for name, owner in module.named_modules()
        if hasattr(owner, "initialize_parameter")
    }
    done: set[Tensor] = set()

    def initial(name: str, shape: Sequence[int]) -> Tensor:
        owner = next(
            (o for o in sorted(owners, key=len) if not o or name.startswith(f"{o}.")), None
        )
        if owner is None:
            raise ConfigError(
                f"Parameter {name!r} was built on the meta device, but its model has no "
                "initialize_parameter(name, "
                "param, generator) to fill it: add one, or build the model on a real device."
            )
        full = torch.empty(tuple(shape), dtype=torch.float32)
        relative, generator = name.removeprefix(f"{owner}."), generator_for(seed, prefix + name)
        owners[owner].initialize_parameter(relative, full, generator)  # pyright: ignore[reportCallIssue]
        return full

    for name, linear in nf4.in_4_bits(module).items():
        if names is not None and f"{name}.codes" not in names:
            continue
        full = initial(f"{name}.weight", (linear.out_features, linear.in_features))
        for part, value in zip(nf4.PARTS, nf4.quantize(full), strict=True):
            place(value, param := linear.get_parameter(part))
            done.add(param)
    for name, param in module.named_parameters(remove_duplicate=False):
        if (names is None or name in names) and param not in done:
            place(initial(name, param.shape), param)
            done.add(param)


@torch.no_grad()
def place(full: Tensor, param: Tensor) -> None:
    """Copy this rank's part of a whole tensor, of which every rank has the same, into a
    parameter.
    """
    if isinstance(param, DTensor):
        full = full.to(param.device, param.dtype)
        # src_data_rank=None: no communication
        full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
    param.copy_(full)
