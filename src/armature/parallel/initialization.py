"""Initial weights by parameter name and seed: the same model under every layout, whatever part a
rank holds.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from armature.errors import ConfigError
from armature.finetune import nf4
from armature.parallel import units
from armature.parallel.gradients import local_part
from armature.parallel.whole_weights import sharded_like

BLOCK = 1 << 22  # elements that one generator draws: 16 MiB in fp32


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

    One that is marked `by_rows` is asked for blocks of rows, each with a generator of its own: a
    rank draws only those that it holds a part of, on all its threads. Of other models one whole
    parameter, in fp32 on the CPU, is in memory at a time.

    Args:
        names: the parameters of `module` to initialize; None: all.
        prefix: prefix of `module`'s parameter names in the names that seed the generators. A
            LightningModule's `model` has the prefix "model.", so that the same seed gives the same
            weights in a bare loop and under a strategy.
    """
    initial = _InitialValues(module, seed=seed, prefix=prefix)
    done: set[Tensor] = set()
    for name, linear in nf4.in_4_bits(module).items():
        if names is not None and f"{name}.codes" not in names:
            continue
        full = torch.empty(linear.out_features, linear.in_features)
        initial.fill(f"{name}.weight", full)
        for part, value in zip(nf4.PARTS, nf4.quantize(full), strict=True):
            place(value, param := linear.get_parameter(part))
            done.add(param)
    for name, param in module.named_parameters(remove_duplicate=False):
        if (names is None or name in names) and param not in done:
            initial.fill(name, param)
            done.add(param)


class _InitialValues:
    """The initial values of a module's parameters, as a function of name, shape and seed."""

    def __init__(self, module: nn.Module, *, seed: int, prefix: str) -> None:
        self._seed, self._prefix = seed, prefix
        self._owners: dict[str, Any] = {
            name: owner
            for name, owner in module.named_modules()
            if hasattr(owner, "initialize_parameter")
        }

    def fill(self, name: str, param: Tensor) -> None:
        """Fill this rank's part of a parameter."""
        known = sorted(self._owners, key=len)
        path = next((each for each in known if not each or name.startswith(f"{each}.")), None)
        if path is None:
            raise ConfigError(
                f"Parameter {name!r} was built on the meta device, but its model has no "
                "initialize_parameter(name, param, generator) to fill it: add one, or build the "
                "model on a real device."
            )
        owner, shape = self._owners[path], param.shape
        by_rows = param.ndim > 0 and getattr(owner.initialize_parameter, "by_rows", False)
        count = shape[0] if param.ndim else 1
        rows = max(1, BLOCK * count // max(1, param.numel())) if by_rows else max(1, count)

        def block(start: int) -> Tensor:
            values = torch.empty((min(rows, count - start), *shape[1:]) if param.ndim else ())
            key = f"{self._prefix}{name}" + (f":{start}" if start else "")
            generator = generator_for(self._seed, key)
            owner.initialize_parameter(name.removeprefix(f"{path}."), values, generator)
            return values

        if rows >= count:
            place(block(0), param)
            return
        own, local = [_own_indices(param, dim) for dim in range(param.ndim)], local_part(param)

        @torch.no_grad()  # which is a thread's own
        def place_block(start: int) -> None:
            (held,) = torch.where((own[0] >= start) & (own[0] < start + rows))
            values = block(start)[own[0][held] - start]
            for dim in range(1, param.ndim):
                if len(own[dim]) < shape[dim]:
                    values = values.index_select(dim, own[dim])
            local[held[0] : held[-1] + 1].copy_(values)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            # list: an error is raised here
            list(threads.map(place_block, (own[0] // rows * rows).unique().tolist()))


def _own_indices(param: Tensor, dim: int) -> Tensor:
    """Return the indices along a dim, in order, of which this rank holds a part."""
    indices = torch.arange(param.shape[dim])
    if not isinstance(param, DTensor):
        return indices
    placements = [
        # of FSDP beside a tensor axis it is no Shard: dim 0 is then cut in another order
        (each if dim == 0 else Shard(0)) if getattr(each, "dim", None) == dim else Replicate()
        for each in param.placements
    ]
    own = distribute_tensor(indices, param.device_mesh, placements, src_data_rank=None)
    return own.to_local().cpu()


@torch.no_grad()
def place(full: Tensor, param: Tensor) -> None:
    """Copy this rank's part of a whole tensor, of which every rank has the same, into a
    parameter.
    """
    param.copy_(sharded_like(param, full))
