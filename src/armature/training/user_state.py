"""What users' objects hold beside weights: counters, lists, generators, a loss's running mean.

Lightning's checkpoints hold no plain attributes. Ours hold those that have changed since training
began, and a resume puts them back: those of the user's module and its parts, callbacks, data module
and optimizers, and of the objects of users' classes that these have, also in lists and dicts. A
value counts that a checkpoint can hold (`checkpoint.plain`) and that is not large. Others are named
once. What a resume builds otherwise, as after another typed setting, is not put back.
"""

import enum
import hashlib
import io
import itertools
import logging
import random
import sys
from argparse import Namespace
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import PurePath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from armature import errors
from armature.checkpoint import optimizers, plain
from armature.data.base import DataModule
from armature.parallel import process_group
from armature.training import epoch_metrics

log = logging.getLogger(__name__)

_MOST_BYTES, _MOST_PARTS = 4_000_000, 100_000  # of a value: a save should not take long
_MOST_ITEMS = 1_000  # objects of a container that are looked at: a dataset may list a million
_LOOKED_AT = 10_000  # of the numbers of a larger array
_FRAMEWORKS = ("armature", "deepspeed", "lightning", "pytorch_lightning", "torch", "torchmetrics")
_MODES = ("training", "track_running_stats")  # of a module: what hooks freeze and unfreeze
# what ModelCheckpoint itself does not save: whether it saves after the next validation, and when it
# saved last
OF_MODEL_CHECKPOINT = ("_defer_save_until_validation", "_last_global_step_saved")
_OF_TRAINER = ("gradient_clip_val", "gradient_clip_algorithm")  # which hooks may change
# to look into costs no time, and no file
_BUILT_IN = (dict, UserDict, MappingProxyType, list, tuple, set, frozenset, deque)
_CONTAINERS = (Mapping, *_BUILT_IN)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CONVERTED = (enum.Enum, PurePath, np.generic, frozenset)  # which `plain` makes another type of
Marks = Mapping[str, Any]  # by an attribute's path: its type, and what tells whether it changes
NONE: Marks = MappingProxyType({})


class _Kept(NamedTuple):
    """A value as a checkpoint holds it, whether its tensors were on the rank's device, and a digest
    of what it was when its object had just been built.
    """

    value: Any
    on_device: bool
    built: bytes | None = None


class UserState:
    """The attributes of users' objects, and which of them training has changed.

    Made when training begins, before the first hook of an epoch.

    Args:
        built: the `marks` before the hooks of the start. Tensors that these have made count as
            changed: a copy of weights would be one of others at a resume.
    """

    def __init__(self, trainer: L.Trainer, built: Marks) -> None:
        self._trainer, self._built = trainer, built
        self._first = {**built, **marks(trainer, tensors=False)}
        self._named: set[str] = set()

    def changed(self, before: Mapping[str, _Kept] = NONE) -> dict[str, _Kept]:
        """Return what has changed since, by its path. Names once what has and cannot be saved.

        Args:
            before: a snapshot from before the validation that runs now, which has all modules in
                eval mode; else nothing.
        """
        found, lost = {}, set()
        modes = {path: kept.value for path, kept in before.items() if path.endswith(".training")}
        for path, value in (_attributes(self._trainer) | modes).items():
            mark, (kind, first) = _mark(value), self._first.get(path, (None, None))
            if mark is None or (mark == first and type(value) is kind):
                continue
            # it can only be put back into an object of its type
            if isinstance(mark, bytes) and (type(value) is kind or not _needs_its_type(value)):
                found[path] = _kept(value, self._built.get(path, (None, None))[1])
            else:
                lost.add(path)
        # an item of what is named already says nothing more
        new = sorted(p for p in lost - self._named if p.rpartition(".")[0] not in lost)
        if new and process_group.rank() == 0:
            log.warning(
                "A resume does not put back: %s. Each is an iterator, larger than %d MB, or no "
                "plain value. If a later step reads it, save it in on_save_checkpoint or a "
                "buffer (docs/resume.md).",
                ", ".join(new), _MOST_BYTES // 1_000_000,
            )  # fmt: skip
        self._named |= lost
        return found


def marks(trainer: L.Trainer, *, tensors: bool = True) -> Marks:
    """Return the types of attributes, without `tensors` of those that hold none, and what tells
    whether they change, by their paths.
    """
    return {
        path: (type(value), _mark(value))
        for path, value in _attributes(trainer).items()
        if tensors or not _holds(value, torch.is_tensor)
    }


def of_ranks(changed: Sequence[dict[str, _Kept]]) -> list[dict[str, _Kept]]:
    """Return what each rank has changed; once, if it is the same on all."""
    return [changed[0]] if len({digest(each) for each in changed}) == 1 else [*changed]


def of_rank(saved: Sequence[dict[str, _Kept]]) -> dict[str, _Kept]:
    """Return what this rank puts back: rank 0's, if a run has another number of ranks now."""
    if len(saved) == process_group.ranks():
        return saved[process_group.rank()]
    own = [path for path in saved[0] if len({digest(each.get(path)) for each in saved}) > 1]
    if own and process_group.rank() == 0:
        log.warning("Each rank had its own value, and all get rank 0's: %s", own)
    return saved[0]


def generators(trainer: L.Trainer) -> dict[str, str]:
    """Return a digest of the state of each generator among the attributes, by its path."""
    return {
        path: digest(_plain(value)).hex()[:16]
        for path, value in _attributes(trainer).items()
        if isinstance(value, _GENERATORS)
    }


def snapshot(trainer: L.Trainer) -> dict[str, _Kept]:
    """Return copies of all attributes that `put_back` can put back, and of all buffers."""
    attributes = _attributes(trainer).items()
    found = {path: value for path, value in attributes if isinstance(_mark(value), bytes)}
    for path, part in trainer.lightning_module.named_modules(prefix="module"):
        for name, value in part.named_buffers(recurse=False):
            found[f"{path}.buffers.{name}"] = value
    return {path: _kept(value) for path, value in found.items()}


def put_back(trainer: L.Trainer, saved: Mapping[str, _Kept], built: Marks = NONE) -> None:
    """Set attributes to saved values, unless they are `built` otherwise for this start: then their
    setting is new. What lists, dicts and tensors hold is replaced in place, so that objects which
    share one still do.
    """
    owners = {owner.path: owner.attributes for owner in _owners(trainer)}
    for path, (value, on_device, then) in saved.items():
        owner, _, name = path.rpartition(".")
        _, now = built.get(path, (None, then))
        if owner in owners and then in (None, now):
            value = plain.restored(value)
            if on_device:
                value = apply_to_collection(
                    value, Tensor, lambda each: each.to(trainer.strategy.root_device)
                )
            owners[owner][name] = _like(owners[owner].get(name), value)


# ---------------------------------------------------------------- attributes
class _Owner(NamedTuple):
    path: str
    attributes: MutableMapping[str, Any]
    keeps: Callable[[str, Any], bool]  # whether an attribute, of a name and value, is the user's


class _Trained(dict[str, bool]):
    """Which of a module's own parameters are trained."""

    def __init__(self, module: nn.Module) -> None:
        self._params = {n: p for n, p in module._parameters.items() if p is not None}
        super().__init__({n: p.requires_grad for n, p in self._params.items()})

    def __setitem__(self, name: str, value: bool) -> None:
        self._params[name].requires_grad = value


def _attributes(trainer: L.Trainer) -> dict[str, Any]:
    """Return the values of all attributes by their paths."""
    # which the model restores; copies of them, such as averages, it does not
    weights = {*map(id, trainer.lightning_module.parameters())}
    return {
        f"{owner.path}.{name}": value
        for owner in _owners(trainer)
        for name, value in [*owner.attributes.items()]
        if owner.keeps(name, value) and not _holds(value, lambda each: id(each) in weights)
    }


def _owners(trainer: L.Trainer) -> Iterator[_Owner]:
    """Yield the objects that users wrote or may set, with their attributes."""
    module, data = trainer.lightning_module, trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    of_data = vars((DataModule if isinstance(data, DataModule) else L.LightningDataModule)())
    roots: list[tuple[str, Any, Any]] = [
        (f"module.{name}".removesuffix("."), part, vars(L.LightningModule()))
        for name, part in module.named_modules()
    ]
    roots += [("data", data, of_data)] * (data is not None)
    roots += [("callback", each, ()) for each in trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
    of_optimizers = vars(torch.optim.SGD([torch.zeros(1)]))
    roots += [("optimizer", each, of_optimizers) for each in trainer.optimizers]
    # what a checkpoint holds, and what is looked at by itself
    seen = {id(each) for _, each, _ in roots} | {id(trainer)}
    seen |= {id(config.scheduler) for config in trainer.lr_scheduler_configs}
    numbers: Counter[str] = Counter()
    for path, owner, names in roots:
        if isinstance(owner, ModelCheckpoint):
            yield _Owner(owner.state_key, vars(owner), lambda n, v: n in OF_MODEL_CHECKPOINT)
        if isinstance(owner, nn.Module) and _package(owner) == "torch":
            # such as a dropout's rate
            yield _Owner(path, vars(owner), lambda n, v: type(v) in (int, float) and n[0] != "_")
        elif _package(owner) not in _FRAMEWORKS:
            if path in ("callback", "optimizer"):
                path = f"{path}.{type(owner).__name__}"
                numbers[path] += 1
                path += f".{numbers[path]}"
            yield from _nested(path, vars(owner), names, seen, package=_package(owner))
        if isinstance(owner, nn.Module):
            yield _Owner(path, vars(owner), lambda name, value: name in _MODES)
            yield _Owner(f"{path}.requires_grad", _Trained(owner), lambda name, value: True)
            unsaved = owner._non_persistent_buffers_set
            yield _Owner(f"{path}.buffers", owner._buffers, lambda n, v, names=unsaved: n in names)
    yield _Owner("trainer", vars(trainer), lambda name, value: name in _OF_TRAINER)


def _nested(
    path: str, attributes: MutableMapping[str, Any], names: Any, seen: set[int], *, package: str
) -> Iterator[_Owner]:
    """Yield an object's attributes, without some names, or a container's items, and those of the
    users' objects and of the containers of objects in it.
    """
    inner: dict[str, Any] = {}
    held: dict[str, Any] = {}
    for name, value in [*attributes.items()]:
        if name not in names and _is_users(value, package):
            inner[name] = vars(value)
        elif (
            name not in names
            and isinstance(value, list | tuple | deque | dict)
            and len(value) <= _MOST_ITEMS
            and _holds_objects(value)
        ):
            held[name] = _Items(value)
    yield _Owner(
        path,
        attributes,
        lambda name, value: not (name in names or name in inner or id(value) in seen),
    )
    for name, own in (inner | held).items():
        value = attributes[name]
        if id(value) not in seen:
            if name in inner:
                seen.add(id(value))
            yield from _nested(f"{path}.{name}", own, (), seen, package=package)


class _Items(dict[str, Any]):
    """The items of a list, tuple, deque or dict by their places."""

    def __init__(self, held: Any) -> None:
        self._held = held
        places = held if isinstance(held, Mapping) else range(len(held))
        # a path has dots between its parts
        self._places = {str(place).replace(".", "·"): place for place in places}
        super().__init__({name: held[place] for name, place in self._places.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self and not isinstance(self._held, tuple):
            self._held[self._places[name]] = value


def _holds_objects(value: Any) -> bool:
    """Return whether a container holds what comes back only into an object that is there."""
    if not isinstance(value, _CONTAINERS):
        is_value = isinstance(value, np.generic | np.ndarray | Tensor)
        return not is_value and type(value).__module__ != "builtins"
    some = itertools.islice(_items_of(value), _MOST_PARTS)
    return hasattr(value, "_fields") or any(map(_holds_objects, some))


def _items_of(container: Any) -> Any:
    return container.values() if isinstance(container, Mapping) else container


def _is_users(value: Any, package: str) -> bool:
    """Return whether a value is an object of a class of the user's, or of the owner's package,
    whose attributes count. Those of installed packages keep what is theirs; a TensorDataset has
    nothing but users' samples, such as points or labels that training moves.
    """
    if isinstance(value, Namespace | SimpleNamespace | TensorDataset):
        return True
    if isinstance(value, type | enum.Enum | Iterator) or _with_state(value):
        return False
    own = _package(value)
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    of_user = own in (package, "__main__") or (file is not None and errors.is_users(file))
    return of_user and own not in _FRAMEWORKS and hasattr(value, "__dict__")


def _package(value: Any) -> str:
    # torch derives a class of its own for a sharded module
    kind = next(each for each in type(value).__mro__ if not issubclass(each, FSDPModule))
    return kind.__module__.partition(".")[0]


# ---------------------------------------------------------------- values
def _set_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(state["tensors"])
    epoch_metrics.restore_states(module, [state["metrics"]])


_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    np.random.RandomState: (
        lambda generator: generator.get_state(legacy=False),
        lambda generator, state: generator.set_state(state),
    ),
    nn.Module: (  # a callback's metric, or its copy of a model
        lambda module: {
            "tensors": dict(module.state_dict()),
            "metrics": epoch_metrics.metric_states(module),
        },
        _set_module_state,
    ),
    # of one in another: what both share, such as groups, stays shared
    Optimizer: (optimizers.whole_state, optimizers.load_whole),
    **{
        kind: (lambda value: value.state_dict(), lambda value, state: value.load_state_dict(state))
        for kind in (LRScheduler, torch.amp.GradScaler)
    },
}


def _with_state(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    """Return what reads and sets the state of a value that is more than plain, or None."""
    return next((pair for kind, pair in _STATES.items() if isinstance(value, kind)), None)


def _needs_its_type(value: Any) -> bool:
    typed = hasattr(value, "_fields") or isinstance(value, _CONVERTED) or _with_state(value)
    return bool(typed) and not isinstance(value, np.generic)  # a Python number will do


def _mark(value: Any) -> object:
    """Return a digest of a value that can be saved; of another one, what tells whether it changes:
    its identity and length, or for an iterator an object that equals nothing. None: it is no state.
    """
    if isinstance(value, bool):  # most are, of modules
        return repr(value).encode()
    if isinstance(value, Iterator):
        return None if isinstance(value, io.IOBase) else object()
    held = isinstance(value, _CONTAINERS)
    try:
        objects = held and not hasattr(value, "_fields") and _holds_objects(value)
        if objects and len(value) <= _MOST_ITEMS:  # their state is looked at by itself
            return id(value), len(value)
        if not objects and _is_small(value):
            return digest(_plain(value))
    except Exception:  # it cannot be made plain, or a method of a user's class fails
        pass
    return _glance(value)


def _glance(value: Any) -> object:
    """Return what tells in no time whether a large value changes, also in place, or None."""
    if isinstance(value, nn.Module):
        return id(value), sum(map(_version, (*value.parameters(), *value.buffers())))
    if isinstance(value, Tensor):  # its first and last numbers: `.data = …` is no new version
        return id(value), _version(value), str(value)
    if isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
        some = value.flat[:: value.size // _LOOKED_AT + 1]
        return id(value), hash(some.tobytes())
    if isinstance(value, _BUILT_IN):
        some = itertools.islice(_items_of(value), 100)
        # containers in it are told by which they are
        parts = [(not isinstance(x, _BUILT_IN) and _glance(x)) or id(x) for x in some]
        return id(value), len(value), parts
    return id(value) if isinstance(value, (Mapping, np.memmap)) or _with_state(value) else None


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _plain(value: Any) -> Any:
    """Return a value as a checkpoint can hold it, or raise NotPlain."""
    pair = _with_state(value)
    return plain.plain(value if pair is None else pair[0](value))


def _kept(value: Any, built: Any = None) -> _Kept:
    elsewhere: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        elsewhere.extend([tensor] if tensor.device.type != "cpu" else [])
        return tensor.detach().to("cpu", copy=True)

    # a generator may be built of no seed
    known = isinstance(built, bytes) and not isinstance(value, _GENERATORS)
    return _Kept(
        apply_to_collection(_plain(value), Tensor, copied),
        bool(elsewhere),
        built if known else None,
    )


def _holds(value: Any, is_one: Callable[[Any], bool]) -> bool:
    """Return whether a value is, or one of the first in a container is, what is looked for."""
    if not isinstance(value, _BUILT_IN):
        return is_one(value)
    return any(_holds(each, is_one) for each in itertools.islice(_items_of(value), 100))


def _is_small(value: Any) -> bool:
    parts, size, waiting = 0, 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, nn.Module):
            waiting += [*each.parameters(), *each.buffers()]
        elif isinstance(each, _CONTAINERS):
            parts += len(each)
            waiting += _items_of(each)
        size += len(each) if isinstance(each, str | bytes) else getattr(each, "nbytes", 0)
        if parts > _MOST_PARTS or size > _MOST_BYTES:
            return False
    return True


def _like(own: Any, value: Any) -> Any:
    """Return a saved value as the attribute's type: in place, where that can be changed."""
    if (pair := _with_state(own)) is not None:
        pair[1](own, value)
    elif (
        isinstance(own, Tensor)
        and isinstance(value, Tensor)
        and own.shape == value.shape
        and not own.is_inference()
    ):
        with torch.no_grad():
            own.copy_(value)
    elif isinstance(own, list) and isinstance(value, list) and len(own) == len(value):
        own[:] = map(_like, own, value)  # tensors in it may be held elsewhere, too
    elif type(own) is type(value) is tuple and len({*map(id, own)}) == len(value):
        return tuple(map(_like, own, value))  # such as a TensorDataset's; not one tensor twice
    elif isinstance(own, list | deque) and type(own) is type(value):
        own.clear()
        own.extend(value)
    elif isinstance(own, dict) and isinstance(value, dict):
        value = {key: _like(own.get(key), each) for key, each in value.items()}
        own.clear()
        own.update(value)
    elif isinstance(own, set) and isinstance(value, set):
        own.clear()
        own.update(value)
    elif hasattr(own, "_fields"):
        return type(own)(*value)
    elif isinstance(own, _CONVERTED):
        kind: Any = type(own)
        return kind(value)
    else:
        return value
    return own


# ---------------------------------------------------------------- digests
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
