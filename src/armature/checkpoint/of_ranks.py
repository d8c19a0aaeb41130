"""What hooks and callbacks of users save differently on each rank: lists of losses, counters,
queues of one's own data.

A checkpoint holds what rank 0 has saved. If another rank has saved something else, the checkpoint
holds that entry of every rank that has it as well, and each continues with its own if the layout is
the same. A rank that has saved nothing takes rank 0's, as all do in Lightning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from armature.checkpoint import directory
from armature.parallel import process_group

log = logging.getLogger(__name__)

KEY = f"{directory.RESERVED}of_ranks"  # the entry of a checkpoint
CALLBACKS = "callbacks"
# beginnings of modules whose code is not users'
NOT_USERS = ("armature.", "lightning.", "pytorch_lightning.")
_OF_ALL = (  # entries that are the same on all ranks, or whose owners arrange them themselves
    "epoch",
    "global_step",
    "loops",
    "lr_schedulers",
    "pytorch-lightning_version",
    "hparams_name",
    "hparams_type",
    "hyper_parameters",
    "datamodule_hparams_name",
    "datamodule_hparams_type",
    "datamodule_hyper_parameters",
)

Place = tuple[str, ...]


def digests(meta: Mapping[str, Any], callbacks: Iterable[Callback]) -> dict[Place, bytes]:
    """Return a digest of each entry that code of users may have made, by its place in the
    checkpoint.
    """
    users = {
        each.state_key
        for each in callbacks
        if not f"{type(each).__module__}.".startswith(NOT_USERS)
    }
    found = {(key,): value for key, value in meta.items() if key not in (CALLBACKS, *_OF_ALL)}
    found |= {
        (CALLBACKS, key): value for key, value in meta.get(CALLBACKS, {}).items() if key in users
    }
    return {place: digest(value) for place, value in found.items()}


def entries(
    meta: Mapping[str, Any], everyones: list[dict[Place, bytes]], *, layout: str
) -> dict[str, Any]:
    """Return the entry `KEY` if ranks differ, on rank 0, else nothing. Called by all ranks.

    Args:
        everyones: the `digests` of each rank.
    """
    places = dict.fromkeys(place for each in everyones for place in each)
    unequal = [
        place
        for place in places
        if place not in everyones[0]
        or len({each[place] for each in everyones if place in each}) > 1
    ]
    if not unequal:
        return {}
    own = {place: _at(meta, place) for place in unequal if place in everyones[process_group.rank()]}
    # another rank has no access to this one's GPU
    own = apply_to_collection(own, Tensor, Tensor.cpu)
    gathered = process_group.gather_object(own)
    return {KEY: {"layout": layout, "entries": gathered}} if gathered else {}


def restore(meta: dict[str, Any], *, layout: str, fits: bool) -> None:
    """Replace rank 0's entries of a checkpoint that was read by this rank's."""
    saved = meta.pop(KEY, None)
    if saved is None:
        return
    of_ranks: list[dict[Place, Any]] = saved["entries"]
    if saved["layout"] == layout and len(of_ranks) == process_group.ranks():
        for place, value in of_ranks[process_group.rank()].items():
            _parent(meta, place)[place[-1]] = value
    elif fits and process_group.rank() == 0:
        names = sorted({place[-1] for each in of_ranks for place in each})
        log.warning(
            "Each rank had saved its own %s (on_save_checkpoint, or state_dict of a callback) "
            "under %s. Under %s all "
            "continue with what rank 0 had.",
            ", ".join(names), saved["layout"], layout,
        )  # fmt: skip


def _at(meta: Mapping[str, Any], place: Place) -> Any:
    for key in place:
        meta = meta[key]
    return meta


def _parent(meta: dict[str, Any], place: Place) -> dict[str, Any]:
    for key in place[:-1]:
        meta = meta.setdefault(key, {})
    return meta


def digest(value: Any) -> bytes:
    """Return a digest of a plain value that is the same in every process."""
    checksum = hashlib.sha256()
    _add(checksum, value)
    return checksum.digest()


def _add(checksum: Any, value: Any) -> None:
    """Add a plain value. Not by pickle, which writes where tensors lie in memory."""
    if isinstance(value, Tensor):
        dense = (value.to_dense() if value.layout != torch.strided else value).detach().cpu()
        values = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        checksum.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        checksum.update(values.contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        checksum.update(f"{type(value).__name__} {len(value)} ".encode())
        for item in value.items():
            _add(checksum, item)
    elif isinstance(value, list | tuple | set):
        checksum.update(f"{type(value).__name__} {len(value)} ".encode())
        for item in sorted(value, key=repr) if isinstance(value, set) else value:
            _add(checksum, item)
    else:
        checksum.update(f"{type(value).__name__} {value!r} ".encode())
