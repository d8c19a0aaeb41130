"""Name the plain attributes that a resume has lost: no checkpoint holds them, as in Lightning.

A checkpoint holds a digest of each attribute of the user's module, callbacks, data module and
optimizers that has changed since training began, on rank 0. After a resume inside an epoch, the
user's own hooks have not restored what then differs.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import io
import logging
import random
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import GeneratorType, SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchmetrics import Metric

from armature.checkpoint.of_ranks import NOT_USERS
from armature.data.base import DataModule
from armature.parallel import process_group
from armature.parallel.gradients import local_part
from armature.training.progress import data_of

log = logging.getLogger(__name__)

# of an attribute: larger ones are not compared, which would take long
_MOST_BYTES, _MOST_PARTS = (4_000_000, 10_000)
_MOST_LEFT_OUT = 20  # attributes of an object that are too large: looking at each may take long
_NUMBERS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    torch.dtype,
    torch.device,
    torch.Size,
)
# words in a digest: the value holds one, whose position is not seen
_ITERATOR, _UNREADABLE = ("iterator", "unreadable")
_UNCHANGED = "unchanged"  # begins a digest of which only types are known
_MAKES = "value)"  # ends a word of a digest: how an object is made of its plain value
# files and loggers: training does not read them
_NO_MATTER = (io.IOBase, logging.Filterer, logging.LoggerAdapter)
_PLAIN = (type(None), bool, int, float, str)
_OF_TRAINER = (  # settings that a hook may change
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "log_every_n_steps",
)
_WITH_STATE = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_OF_FRAMEWORKS = (nn.Module, L.Trainer, Optimizer, LRScheduler)


def digests(trainer: Any) -> dict[str, str]:
    """Return a digest of each attribute and buffer that no checkpoint holds, by its owner's class
    and its name.
    """
    found, module, classes = {}, trainer.lightning_module, set()
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    saved = frozenset(map(id, (*module.modules(), *trainer.optimizers, *schedules)))
    for label, owner, frameworks in owners(trainer):
        for name, value in _attributes(owner, classes):
            if inspect.isroutine(value):  # torch and Lightning replace methods
                continue
            if name not in frameworks and (digest := _digest(value, saved)) is not None:
                found[f"{label}.{name}"] = digest
    for label, owner, names in _settings(trainer):
        found |= {
            f"{label}.{name}": repr(getattr(owner, name, None)).replace(" ", "_") for name in names
        }
    for path, buffer in _unsaved_buffers(module):
        if (digest := _digest(buffer)) is not None:
            found[f"{type(module).__name__}.{path}"] = digest
    return found


def _settings(trainer: Any) -> Iterator[tuple[str, Any, Iterable[str]]]:
    """Yield a label, a trainer or a layer of torch, and the names of its plain attributes: a
    dropout's `p`.
    """
    yield "Trainer", trainer, _OF_TRAINER
    module = trainer.lightning_module
    for path, part in module.named_modules():
        if _class_of(part).__module__.startswith("torch."):
            names = [
                n
                for n, v in vars(part).items()
                if type(v) in _PLAIN and n[0] != "_" and n != "training"
            ]
            yield f"{type(module).__name__}.{path}", part, names


def _unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a module does not save, until they are many: tables of positions
    hardly ever change.
    """
    left = 4 * _MOST_BYTES
    for path, part in module.named_modules():
        for name in sorted(part._non_persistent_buffers_set):
            buffer = part._buffers.get(name)
            # sparse ones have no nbytes
            size = 0 if buffer is None else buffer.numel() * buffer.element_size()
            if buffer is not None and size <= left:
                left -= size
                yield f"{path}.{name}".removeprefix("."), buffer


def changed(trainer: Any, since: Mapping[str, str] | None) -> dict[str, str]:
    """Return the digests that are not as in `since`; none if training has not begun (None).

    Of others only the types are kept that a checkpoint does not give back: loading it may replace
    them.
    """
    if since is None:
        return {}
    now = digests(trainer)
    kept = {
        name: " ".join([_UNCHANGED, *types])
        for name, each in now.items()
        if (types := _types(each))
    }
    return kept | _differing(now, since)


def _differing(digests: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    return {name: each for name, each in digests.items() if _differs(each, others.get(name))}


def _differs(digest: str, other: str | None) -> bool:
    if digest.startswith(_UNCHANGED):
        return not _types(digest) <= _types(other or digest)
    return digest != other or _UNREADABLE in digest.split()


def _types(digest: str) -> set[str]:
    return {word for word in digest.split() if word.endswith(_MAKES)}


def warn_of_lost(trainer: Any, saved: Mapping[str, str]) -> None:
    """Warn on rank 0 of the attributes that differ from when the checkpoint was saved."""
    if not saved or process_group.rank() != 0:
        return
    now = digests(trainer)
    lost = _differing(saved, now)
    iterators = sorted(name for name, digest in lost.items() if _ITERATOR in digest.split())
    advice = ""
    if iterators:
        advice = (
            f" An iterator cannot be saved ({', '.join(iterators)}): save how many items it has "
            "yielded, and in "
            "on_train_start call next() as often; or return its loader from train_dataloader, in a "
            "CombinedLoader."
        )
    if unseen := sorted(name for name in iterators if _UNREADABLE in lost[name].split()):
        advice += (
            f" {', '.join(unseen)}: how far it is cannot be read, so this is also named if "
            "that is done."
        )
    for name in sorted(lost):
        if types := sorted(_types(lost[name]) - _types(now.get(name, ""))):
            advice += (
                f" If {name} is saved: a checkpoint gives plain values back. Write "
                f"{', '.join(types)} on loading."
            )
    if lost:
        log.warning(
            "Not as they were when the checkpoint was saved: %s. No checkpoint holds such "
            "attributes. If a step reads "
            "one that was set before it, the resumed run differs: save it in on_save_checkpoint, "
            "state_dict or a "
            "buffer (docs/resume.md).%s",
            ", ".join(sorted(lost)), advice,
        )  # fmt: skip


def owners(trainer: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield a label, an object of a user's class, and the names of its attributes that are not the
    user's.
    """
    module, data = trainer.lightning_module, data_of(trainer)
    of_modules = vars(L.LightningModule()).keys()
    for name, part in module.named_modules():
        if _is_users(part):
            yield f"{type(module).__name__}{'.' * bool(name)}{name}", part, of_modules
    data = getattr(data, "module", data)  # a PlainData's
    if data is not None and _is_users(data):
        ours = vars(DataModule(global_batch_size=1)).keys() if isinstance(data, DataModule) else ()
        yield type(data).__name__, data, {*vars(L.LightningDataModule()), *ours}
    for each in trainer.callbacks:
        if _is_users(each):
            yield type(each).__name__, each, ()
    for each in trainer.optimizers:
        if _is_users(each):
            yield type(each).__name__, each, vars(torch.optim.SGD([torch.zeros(1)])).keys()


def _is_users(value: Any) -> bool:
    return _is_users_class(_class_of(value)) and (hasattr(value, "__dict__") or bool(_slots(value)))


def _class_of(value: Any) -> type:
    """Return an object's class as its author wrote it: torch derives another one for a sharded
    module.
    """
    return next(kind for kind in type(value).__mro__ if not issubclass(kind, FSDPModule))


def _is_users_class(kind: type) -> bool:
    frameworks = (*NOT_USERS, "torch.", "torchmetrics.", "builtins.")
    return not f"{kind.__module__}.".startswith(frameworks)


def _attributes(value: Any, classes: set[type]) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, and those of its users' classes but `classes`, to which these
    are added.
    """
    own = {**getattr(value, "__dict__", {}), **_slots(value)}
    yield from own.items()
    for kind in type(value).__mro__:
        if kind in classes or not _is_users_class(kind) or issubclass(kind, enum.Enum):
            continue
        classes.add(kind)
        for name, each in vars(kind).items():
            if not (
                name in own
                or name.startswith("__")
                or inspect.isroutine(each)
                or inspect.isdatadescriptor(each)
            ):
                yield name, each


def _slots(value: Any) -> dict[str, Any]:
    found = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def is_small(value: Any) -> bool:
    """Return whether a value is compared."""
    return _digest(value) is not None


def _digest(value: Any, saved: frozenset[int] = frozenset()) -> str | None:
    """Return a digest of a value that is the same in another process; None if it is large.

    Args:
        saved: the ids of objects whose state a checkpoint holds.
    """
    digest = _Digest(saved)
    try:
        digest.add(value)
    except Exception:  # of a user's class, too
        return None
    return " ".join([digest.hash.hexdigest()[:16], *sorted(digest.words)])


def _state_of(value: Any) -> Any:
    """Return the state of an object that keeps it out of sight of `vars`."""
    if not isinstance(value, nn.Module):
        return value.state_dict()
    if any(isinstance(param, DTensor) for param in value.parameters()):
        raise ValueError("gathering it would need all ranks")
    metrics = [part for part in value.modules() if isinstance(part, Metric)]
    return [
        dict(value.state_dict()),
        *((each.update_count, dict(each.metric_state)) for each in metrics),
    ]


def _position_of(iterator: Iterator[Any]) -> Sequence[Any]:
    """Return what tells how far an iterator is, or raise an exception."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return () if frame is None else (frame.f_lasti, iterator.gi_yieldfrom, frame.f_locals)
    if isinstance(iterator, _BaseDataLoaderIter):
        return (iterator._num_yielded,)
    if type(iterator).__reduce__ is object.__reduce__:
        raise ValueError("it does not tell")
    # itertools: Python 3.14 has none
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        reduced = iterator.__reduce__()
    return () if isinstance(reduced, str) else reduced[1:]


def _stars_of(value: Any) -> str | None:
    """Return the stars in `Type(**value)`, which makes an object of its plain value in a
    checkpoint, or None.
    """
    if (dataclasses.is_dataclass(value) and not isinstance(value, type)) or isinstance(
        value, SimpleNamespace
    ):
        return "**"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "*"
    return "" if isinstance(value, enum.Enum | PurePath | np.generic | frozenset) else None


class _Digest:
    def __init__(self, saved: frozenset[int]) -> None:
        self.hash, self.left, self.parents, self.saved = hashlib.sha256(), _MOST_BYTES, set(), saved
        self.parts_left, self.may_leave_out, self.classes = _MOST_PARTS, _MOST_LEFT_OUT, set()
        self.words: set[str] = set()

    def add(self, value: Any) -> None:
        """Add a value and all that it consists of.

        Raise ValueError if it is too large, or made anew in each step.
        """
        self.parts_left -= 1
        self._require_small(value)
        self.write(type(value).__name__.encode())
        if (stars := _stars_of(value)) is not None:
            self.words.add(f"{type(value).__name__}({stars}{_MAKES}")
        if isinstance(value, _NUMBERS):
            self.write(repr(value).encode())
        elif isinstance(value, Tensor | np.ndarray):
            self._add_array(value)
        elif isinstance(value, torch.Generator):
            self.add(value.get_state())
        elif isinstance(value, np.random.Generator):
            self.add(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            self.add(value.get_state(legacy=False))
        elif isinstance(value, random.Random):
            self.add(value.getstate())
        elif isinstance(value, PurePath):  # its slots hold what it has computed
            self.write(str(value).encode())
        elif isinstance(value, set | frozenset):
            self.add(sorted(value, key=repr))
        else:
            self._add_parts(value)

    def _add_parts(self, value: Any) -> None:
        """Add what a container or an object of a user's class holds.

        Anything else counts by its type alone.
        """
        parts = []
        if id(value) in self.parents or isinstance(value, _NO_MATTER):
            return
        if isinstance(value, Mapping):
            parts = [each for item in value.items() for each in item]
        elif isinstance(value, list | tuple | deque):
            parts = list(value)
        elif isinstance(value, _WITH_STATE) and id(value) not in self.saved:
            parts = [_state_of(value)]
        elif isinstance(value, Dataset) or (
            _is_users(value) and not isinstance(value, _OF_FRAMEWORKS)
        ):
            self._add_attributes(value)
            return
        elif isinstance(value, Iterator):
            self._add_iterator(value)
            return
        # a history of losses: at once, which is faster
        if all(type(part) in _PLAIN for part in parts):
            self.write(repr(parts).encode())
            return
        self.parents.add(id(value))
        for part in parts:
            self.add(part)
        self.parents.discard(id(value))

    def _add_iterator(self, value: Iterator[Any]) -> None:
        """Add how far an iterator is. What cannot be read, or is large, counts as moved."""
        if f"{type(value).__module__}.".startswith(NOT_USERS):
            return
        self.words.add(_ITERATOR)
        before, parents = (self.hash.copy(), self.left, self.parts_left), self.parents
        self.parents = {*parents, id(value)}
        try:
            for part in _position_of(value):
                self.add(part)
        except Exception:
            self.words.add(_UNREADABLE)
            self.hash, self.left, self.parts_left = before
        self.parents = parents

    def _add_attributes(self, value: Any) -> None:
        """Add the attributes of an object, without those that are too large: a data set's images
        hide no others.
        """
        parents = {*self.parents, id(value)}
        for name, each in _attributes(value, self.classes):
            self.write(name.encode())
            before = self.hash.copy(), self.left, self.parts_left
            self.parents = {*parents}
            try:
                self.add(each)
            except ValueError:
                self.may_leave_out -= 1
                if self.may_leave_out < 0:
                    raise
                self.hash, self.left, self.parts_left = before
                self.write(b"left out")
        self.parents = parents - {id(value)}

    def _add_array(self, value: Tensor | np.ndarray) -> None:
        if isinstance(value, Tensor):
            value = local_part(value)
            plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
            # the output of a step is made anew
            if not plain or (value.requires_grad and not self.parents):
                raise ValueError("no plain value")
            value = (
                value.detach()
                .resolve_conj()
                .cpu()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
            )
        self.write(f"{value.dtype} {value.shape}".encode())
        self.write(
            value.tobytes() if value.dtype.kind in "biufcSU" else repr(value.tolist()).encode()
        )

    def _require_small(self, value: Any) -> None:
        """Raise ValueError for what `write` would refuse once it is copied: a text, an array or a
        list of gigabytes.
        """
        size, most = 0, self.left
        if isinstance(value, Tensor | np.ndarray):
            size = value.nbytes
        elif isinstance(value, str | bytes):
            size = len(value)
        elif isinstance(value, list | tuple | deque | Mapping | set | frozenset):
            size, most = len(value), self.parts_left
        if size > most:
            raise ValueError("large")

    def write(self, data: bytes) -> None:
        self.left -= len(data)
        if min(self.left, self.parts_left) < 0:
            raise ValueError("large")
        self.hash.update(data)
