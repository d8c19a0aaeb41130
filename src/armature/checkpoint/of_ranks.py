"""What hooks and callbacks of users save differently on each rank: lists of losses, counters,
queues of one's own data.

meta.pt holds what rank 0 has saved, and under `KEY` what each rank has saved otherwise: it
continues with its own if the layout is the same. A rank that has saved nothing takes rank 0's, as
all do in Lightning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from armature.checkpoint import directory
from armature.parallel import process_group

log = logging.getLogger(__name__)

KEY = f"{directory.RESERVED}of_ranks"
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

Place = tuple[str, ...]  # the keys that lead to an entry


def entries(meta: Mapping[str, Any], callbacks: Iterable[Callback]) -> dict[Place, Any]:
    """Return each entry that code of users may have made, by its place in the checkpoint."""
    users = {
        each.state_key
        for each in callbacks
        if not f"{type(each).__module__}.".startswith(NOT_USERS)
    }
    found = {
        (key,): value
        for key, value in meta.items()
        if key not in (CALLBACKS, *_OF_ALL) and not str(key).startswith(directory.RESERVED)
    }
    states = meta.get(CALLBACKS, {}).items()
    return found | {(CALLBACKS, key): value for key, value in states if key in users}


def digests(own: Mapping[Place, Any]) -> dict[Place, bytes]:
    """Return what tells whether other ranks have saved the same."""
    return {place: digest(value) for place, value in own.items()}


def differing(own: Mapping[Place, Any], first: Mapping[Place, bytes]) -> dict[Place, Any]:
    """Return the `entries` of a rank that are not those of rank 0, by rank 0's `digests`."""
    return {place: value for place, value in own.items() if digest(value) != first.get(place)}


def restore(meta: dict[str, Any], *, layout: str, fits: bool) -> None:
    """Replace rank 0's entries of a checkpoint that was read by this rank's."""
    saved = meta.pop(KEY, None)
    if saved is None:
        return
    if (saved["layout"], len(saved["ranks"])) == (layout, process_group.ranks()):
        for place, value in saved["ranks"][process_group.rank()].items():
            owner = meta if len(place) == 1 else meta.setdefault(place[0], {})
            owner[place[-1]] = value
    elif fits and process_group.rank() == 0:
        log.warning(
            "Each rank had saved its own %s (on_save_checkpoint, or state_dict of a callback) "
            "under %s. Under %s all continue with what rank 0 had.",
            ", ".join(sorted({place[-1] for of_rank in saved["ranks"] for place in of_rank})),
            saved["layout"],
            layout,
        )


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
    elif isinstance(value, Mapping | list | tuple | set):
        items = value.items() if isinstance(value, Mapping) else value
        checksum.update(f"{type(value).__name__} {len(value)} ".encode())
        for item in sorted(items, key=repr) if isinstance(value, set) else items:
            _add(checksum, item)
    else:
        checksum.update(f"{type(value).__name__} {value!r} ".encode())
