"""Initial weights by parameter name and seed: the same model under every layout, whatever a rank holds of it."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the seed and the parameter's name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def assign(param: Tensor, full: Tensor) -> None:
    """Copy a full, undivided value into a parameter, or this rank's part of it into its shard."""
    if isinstance(param, DTensor):
        # every rank made the same `full`: no communication (src_data_rank=None), each keeps its own part
        full = distribute_tensor(
            full.to(param.device, param.dtype), param.device_mesh, param.placements, src_data_rank=None
        )
    with torch.no_grad():
        param.copy_(full)


def materialize(module: nn.Module, *, device: torch.device) -> set[str]:
    """Give storage on `device` to what is on the meta device, and move the rest there. Tied parameters stay tied.

    Returns:
        The names of the parameters that were on the meta device, and hold no values yet.
    """
    meta_names = {name for name, param in module.named_parameters(remove_duplicate=False) if param.is_meta}
    if buffers := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise ValueError(f"Buffers {', '.join(buffers)} are on the meta device: make their values in forward instead.")
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # keeps a parameter's identity, and so its ties
    try:
        if meta_names:
            module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
        else:
            module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
    return meta_names


def initialize_by_name(module: nn.Module, *, seed: int, names: set[str] | None = None, prefix: str = "") -> None:
    """Fill parameters, one full CPU tensor at a time, by the `initialize_parameter` of the model that owns them.

    Args:
        module: a model, or anything that holds models, such as a LightningModule.
        names: which parameters of `module` to fill; None: all.
        prefix: what stands before `module`'s names in the names that seed the generators. A LightningModule's `model`
            has the prefix "model." there, so the same seed makes the same weights in a bare loop and under a strategy.

    Raises:
        ValueError: for a parameter that no model initializes.
    """
    owners = {name: owner for name, owner in module.named_modules() if hasattr(owner, "initialize_parameter")}
    done: set[Tensor] = set()
    for name, param in module.named_parameters(remove_duplicate=False):
        if (names is not None and name not in names) or param in done:
            continue
        owner = next((o for o in sorted(owners, key=len) if not o or name.startswith(f"{o}.")), None)
        if owner is None:
            raise ValueError(
                f"Parameter {name!r} was built on the meta device, but its model has no initialize_parameter(name, "
                "param, generator) to fill it: add one, or build the model on a real device."
            )
        full = torch.empty(param.shape, dtype=torch.float32)
        relative = name.removeprefix(f"{owner}.") if owner else name
        owners[owner].initialize_parameter(relative, full, generator_for(seed, prefix + name))  # pyright: ignore[reportCallIssue]
        assign(param, full)
        done.add(param)
