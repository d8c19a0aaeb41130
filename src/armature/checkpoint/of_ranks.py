"""What hooks and callbacks of users save differently on each rank: lists of losses, counters,
queues of one's own data.

meta.pt holds what rank 0 has saved. What another rank has saved otherwise lies beside the tensors,
and each continues with its own if the layout is the same. A rank that has saved nothing takes rank
0's, as all do in Lightning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from armature.checkpoint import directory, plain, storage
from armature.parallel import process_group

log = logging.getLogger(__name__)

KEY = f"{directory.RESERVED}of_rank."  # before the rank: the entry of a checkpoint
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


def entry(
    meta: Mapping[str, Any],
    own: Mapping[Place, bytes],
    first: Mapping[Place, bytes],
    *,
    layout: str,
) -> dict[str, bytes]:
    """Return what this rank saves otherwise than rank 0, under its name in the checkpoint.

    Args:
        own, first: the `digests` of this rank and of rank 0.
    """
    values = {place: _at(meta, place) for place in own if own[place] != first.get(place)}
    saved = {"layout": layout, "ranks": process_group.ranks(), "entries": values}
    return {f"{KEY}{process_group.rank()}": storage.dumped(saved)} if values else {}


def restore(meta: dict[str, Any], checkpoint: Path, *, layout: str, fits: bool) -> None:
    """Replace rank 0's entries of a checkpoint that was read by this rank's."""
    names = storage.read_metadata(checkpoint).state_dict_metadata
    everyones: dict[str, Any] = {name: None for name in names if name.startswith(KEY)}
    if not everyones:
        return
    storage.read_tensors(checkpoint, everyones, alone=True)
    saved = {name: storage.loaded(value) for name, value in everyones.items()}
    first = next(iter(saved.values()))
    if (first["layout"], first["ranks"]) == (layout, process_group.ranks()):
        own = saved.get(f"{KEY}{process_group.rank()}", {"entries": {}})
        for place, value in own["entries"].items():
            _parent(meta, place)[place[-1]] = plain.restored(value)
    elif fits and process_group.rank() == 0:
        log.warning(
            "Each rank had saved its own %s (on_save_checkpoint, or state_dict of a callback) "
            "under %s. Under %s all continue with what rank 0 had.",
            ", ".join(sorted({place[-1] for each in saved.values() for place in each["entries"]})),
            first["layout"],
            layout,
        )


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
