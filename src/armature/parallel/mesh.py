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
    known = {axis: int(size) for axis, size in sizes.items() if size != "auto"}
    unknown = [axis for axis in AXES if axis not in known]
    if len(unknown) > 1:
        raise ValueError(f"{asked}: only one axis may be auto, the others need a number.")
    product = math.prod(known.values())
    rest, left = divmod(world_size, product)
    if not left and (unknown or rest == 1):
        return {axis: known.get(axis, rest) for axis in AXES}
    multiple = max(1, round(world_size / product)) * product if unknown else product
    divides = not unknown and world_size % (product // known["shard"]) == 0
    raise ValueError(
        f"{asked}: {product} does not make up the {world_size} processes. Type "
        f"trainer.devices={multiple}{', or strategy.shard=auto' * divides}."
    )


def shards_sequence(option: bool | str, *, device: str, expert: int = 1) -> bool:
    """Return whether activations are sharded over the tensor axis; auto: except on CPUs without an
    expert axis.

    It saves memory, of which a CPU's host has most, for two collectives where one would do. An
    expert axis needs it: tensor ranks would otherwise send the same tokens.
    """
    return device != "cpu" or expert > 1 if option == "auto" else bool(option)


def gathers_keys(method: str, heads: int, context: int) -> bool:
    """Return whether ranks of the context axis gather keys and values, instead of exchanging
    positions for heads: `auto` does if the ranks are more than, or do not divide, a rank's heads.
    """
    return method == "all_gather" or (method == "auto" and heads % context != 0)


def build(sizes: Mapping[str, int], *, device_type: str) -> DeviceMesh:
    """Return the mesh pipe × replicate × shard × tensor, of shard and of axes with several ranks.

    Each axis costs connections and a communicator, also of one rank. "shard" is the ranks that
    shard weights, those of the axes shard and context together: ranks that share samples have the
    same weights too.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # it logs on every rank that gathering a doubly sharded tensor takes two collectives, which
    # users cannot change
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ranks = {**sizes, "shard": sizes["shard"] * sizes["context"]}
    unused = {axis for axis in AXES if axis != "shard" and ranks[axis] == 1}
    names = tuple(axis for axis in AXES if axis not in unused | {"context"})
    return init_device_mesh(device_type, tuple(ranks[axis] for axis in names), mesh_dim_names=names)


def find_axis(mesh: DeviceMesh, axis: str) -> DeviceMesh | None:
    """Return this rank's part of an axis, or None for one of a single rank, which has no group."""
    return mesh[axis] if axis in (mesh.mesh_dim_names or ()) else None


def context_group(mesh: DeviceMesh, *, context: int) -> dist.ProcessGroup:
    """Return the group of ranks that share this rank's samples, in the order of their positions."""
    shard = mesh["shard"]
    shape = (shard.size() // context, context)
    return shard._unflatten(0, shape, ("samples", "context"))["context"].get_group()


def expert_mesh(mesh: DeviceMesh, *, expert: int) -> DeviceMesh:
    """Return the same ranks as pipe × replicate × rest × expert: each stage's experts are on ranks
    of their own.

    `expert` and `rest`, which shards each expert's weights, are all ranks of a replica of a stage.
    """
    kept = [axis for axis in ("pipe", "replicate") if find_axis(mesh, axis) is not None]
    sizes = {axis: mesh[axis].size() for axis in kept}
    sizes["rest"] = mesh.size() // (math.prod(sizes.values()) * expert)
    sizes["expert"] = expert
    return _as_one_axis(mesh, "world")._unflatten(0, (*sizes.values(),), (*sizes,))


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
        f"Type strategy.expert={min(fits, key=lambda n: abs(n - expert))}."
    )


def data_mesh(mesh: DeviceMesh, *, shard: str = "shard") -> DeviceMesh:
    """Return the ranks with the same stage and part of the tensor axis: those that replicate, if
    there are any, × those that shard.
    """
    return mesh[shard] if find_axis(mesh, "replicate") is None else mesh["replicate", shard]


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of ranks with different samples or positions and the same stage and part of
    the tensor axis.
    """
    return _as_one_axis(data_mesh(mesh), "data").get_group()


def _as_one_axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh._flatten(name)
