"""The axes of a mesh. Torch-free except for `build` and the groups."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

# slowest first: the ranks of a tensor group are neighbors
AXES = ("pipe", "replicate", "shard", "context", "tensor")
# precision → type in which sharded weights are gathered; their gradients are reduced in fp32.
# Others: the weights' own
GATHERED_IN = {"bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16"}


def resolve(sizes: Mapping[str, int | str], *, world_size: int) -> dict[str, int]:
    """Return the axes' sizes; the one that is `auto` takes the remaining processes."""
    asked = ", ".join(f"strategy.{axis}={sizes[axis]}" for axis in AXES)
    wrong = [
        f"strategy.{axis}={size}"
        for axis, size in sizes.items()
        if size != "auto" and not _is_whole(size)
    ]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: must be a number of ranks, or auto. Type 1 for an unused axis."
        )
    known = {axis: int(size) for axis, size in sizes.items() if size != "auto"}
    if bad := [f"strategy.{axis}={size}" for axis, size in known.items() if size < 1]:
        raise ValueError(
            f"{', '.join(bad)}: an axis has at least one rank. Type 1 for an unused axis."
        )
    unknown = [axis for axis in AXES if axis not in known]
    if len(unknown) > 1:
        raise ValueError(f"{asked}: only one axis may be auto, the others need a number.")
    product = math.prod(known.values())
    if unknown and world_size % product == 0:
        return {axis: known.get(axis, world_size // product) for axis in AXES}
    if not unknown and product == world_size:
        return {axis: known[axis] for axis in AXES}
    multiple = max(1, round(world_size / product)) * product
    remedy = (
        f"trainer.devices={multiple}" if unknown else f"trainer.devices={product}, or one axis auto"
    )
    raise ValueError(
        f"{asked}: {product} does not make up the {world_size} processes. Type {remedy}."
    )


def _is_whole(size: int | str) -> bool:
    return isinstance(size, int) or size.removeprefix("-").isdecimal()


def shards_sequence(option: bool | str, *, device: str, expert: int = 1) -> bool:
    """Return whether activations are sharded over the tensor axis; auto: except on CPUs without an
    expert axis.

    It saves memory, of which a CPU's host has most, for two collectives where one would do. An
    expert axis needs it: tensor ranks would otherwise send the same tokens.
    """
    return device != "cpu" or expert > 1 if option == "auto" else bool(option)


def build(sizes: Mapping[str, int], *, device_type: str) -> DeviceMesh:
    """Return the mesh pipe × replicate × shard × tensor, whose axis "shard" is the ranks that shard
    weights.

    Those are the ranks of the axes shard and context together: ranks that share samples have the
    same weights too.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # it logs on every rank that gathering a doubly sharded tensor takes two collectives, which
    # users cannot change
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ranks = {**sizes, "shard": sizes["shard"] * sizes["context"]}
    names = tuple(axis for axis in AXES if axis != "context")
    return init_device_mesh(device_type, tuple(ranks[axis] for axis in names), mesh_dim_names=names)


def context_group(sizes: Mapping[str, int]) -> dist.ProcessGroup:
    """Return the group of ranks that share this rank's samples, in the order of their positions."""
    import torch.distributed as dist

    context, tensor = sizes["context"], sizes["tensor"]
    block = context * tensor
    starts = (
        first + place
        for first in range(0, math.prod(sizes.values()), block)
        for place in range(tensor)
    )
    group, _ = dist.new_subgroups_by_enumeration(
        [[*range(start, start + block, tensor)] for start in starts]
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def expert_mesh(mesh: DeviceMesh, *, expert: int) -> DeviceMesh:
    """Return the same ranks as pipe × replicate × rest × expert: each stage's experts are on ranks
    of their own.

    `expert` and `rest`, which shards each expert's weights, are all ranks of a replica of a stage.
    """
    pipe, replicate = mesh["pipe"].size(), mesh["replicate"].size()
    shape = (pipe, replicate, mesh.size() // (pipe * replicate * expert), expert)
    return mesh._flatten("world")._unflatten(0, shape, ("pipe", "replicate", "rest", "expert"))


def expert_problem(expert: int, sizes: Mapping[str, int]) -> str | None:
    """Return why the expert axis does not fit into the mesh, or None."""
    borrowed = {axis: size for axis, size in sizes.items() if axis not in ("pipe", "replicate")}
    ranks = math.prod(borrowed.values())
    if expert >= 1 and ranks % expert == 0:
        return None
    asked = ", ".join(f"strategy.{axis}={size}" for axis, size in borrowed.items())
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return (
        f"strategy.expert={expert} does not divide the {ranks} ranks that it is made of ({asked}). "
        "Type "
        f"strategy.expert={min(fits, key=lambda n: abs(n - expert))}."
    )


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of ranks with different samples or positions and the same stage and part of
    the tensor axis.
    """
    return mesh["replicate", "shard"]._flatten("data").get_group()
