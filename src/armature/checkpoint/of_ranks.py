"""What hooks and callbacks of users save differently on each rank: lists of losses, counters, queues of one's own data.

A checkpoint holds what rank 0 has saved. If another rank has saved something else, the checkpoint holds that entry of
every rank as well, and each continues with its own if the layout is the same.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from armature.parallel import process_group

log = logging.getLogger(__name__)

KEY = "of_ranks"  # the entry of a checkpoint
CALLBACKS = "callbacks"
_NOT_USERS = ("armature.", "lightning.", "pytorch_lightning.")
_OF_ALL = (  # entries that are the same on all ranks, or whose owners arrange them themselves
    "epoch", "global_step", "loops", "lr_schedulers", "pytorch-lightning_version", "hparams_name", "hparams_type",
    "hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type", "datamodule_hyper_parameters",
)  # fmt: skip

Place = tuple[str, ...]


def digests(meta: Mapping[str, Any], callbacks: Iterable[Callback]) -> dict[Place, bytes]:
    """Return a digest of each entry that code of users may have made, by its place in the checkpoint."""
    users = {each.state_key for each in callbacks if not f"{type(each).__module__}.".startswith(_NOT_USERS)}
    found = {(key,): value for key, value in meta.items() if key not in (CALLBACKS, *_OF_ALL)}
    found |= {(CALLBACKS, key): value for key, value in meta.get(CALLBACKS, {}).items() if key in users}
    return {place: _digest(value) for place, value in found.items()}


def entries(meta: Mapping[str, Any], everyones: list[dict[Place, bytes]], *, layout: str) -> dict[str, Any]:
    """Return the entry `KEY` if ranks differ, else nothing. Called by all ranks.

    Args:
        everyones: the `digests` of each rank.
    """
    places = dict.fromkeys(place for each in everyones for place in each)
    unequal = [place for place in places if len({each.get(place) for each in everyones}) > 1]
    if not unequal:
        return {}
    own = {place: _at(meta, place) for place in unequal if place in everyones[process_group.rank()]}
    own = apply_to_collection(own, Tensor, Tensor.cpu)  # another rank has no access to this one's GPU
    return {KEY: {"layout": layout, "entries": process_group.all_gather_object(own)}}


def restore(meta: dict[str, Any], *, layout: str, fits: bool) -> None:
    """Replace rank 0's entries of a checkpoint that was read by this rank's."""
    saved = meta.pop(KEY, None)
    if saved is None:
        return
    of_ranks: list[dict[Place, Any]] = saved["entries"]
    if saved["layout"] == layout and len(of_ranks) == process_group.ranks():
        for place in of_ranks[0].keys() - of_ranks[process_group.rank()].keys():
            _parent(meta, place).pop(place[-1], None)
        for place, value in of_ranks[process_group.rank()].items():
            _parent(meta, place)[place[-1]] = value
    elif fits and process_group.rank() == 0:
        names = sorted({place[-1] for each in of_ranks for place in each})
        log.warning(
            "Each rank had saved its own %s (on_save_checkpoint, or state_dict of a callback) under %s. Under %s all "
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


def _digest(value: Any) -> bytes:
    file = _Hash()
    pickle.dump(_ordered(value), file, protocol=pickle.HIGHEST_PROTOCOL)
    return file.hash.digest()


def _ordered(value: Any) -> Any:
    """Return a plain value with lists in place of sets, whose order differs between processes."""
    if isinstance(value, set):
        return sorted(value, key=repr)
    if isinstance(value, dict):
        return {key: _ordered(item) for key, item in value.items()}
    return [*map(_ordered, value)] if isinstance(value, list | tuple) else value


class _Hash:
    """A file that keeps the checksum of what is written into it."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)
