"""Make what modules and callbacks put into a checkpoint plain, so that
`torch.load(weights_only=True)` reads it.

Whatever is refused is refused when it is saved. On loading it would be too late: none of the run's
checkpoints could be read.
"""

import dataclasses
import enum
import functools
import logging
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from omegaconf import Container, OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor

from armature.checkpoint import directory
from armature.errors import MASK, ConfigError
from armature.validation import values

log = logging.getLogger(__name__)

_KEPT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    torch.dtype,
    torch.device,
    torch.Size,
)
# a value of a derived class becomes one of these
_BUILT_IN: tuple[Any, ...] = (int, float, complex, str, bytes)
NDARRAY = "__ndarray__"  # the only key of a dict that holds a NumPy array's numbers as a tensor
DEQUE = {"__deque__", "maxlen"}  # the keys of a dict that holds a deque's items and its limit
# the keys of a dict that holds a defaultdict's items, and of what type its default is
DEFAULTS = {"__defaultdict__", "factory"}
_FACTORIES = {
    kind.__name__: kind
    for kind in (int, float, str, list, dict, set, tuple, bool, deque, Counter, OrderedDict)
}
# names of entries that a module's hook gives and no checkpoint can hold
REMADE = f"{directory.RESERVED}remade"
HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# classes, which loading would have to import
_HYPER_PARAMETER_TYPES = ("hparams_type", "datamodule_hparams_type")


class NotPlain(Exception):
    """A value that cannot be made plain: its path, such as `callbacks['Mine']['rate']`, and its
    type.
    """

    def __init__(self, path: str, value: Any) -> None:
        self.path, self.type = path, type_name(value)
        super().__init__(path)


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def require_plain(value: Any, place: str) -> Any:
    """Return a value made plain, or raise a ConfigError that names its place."""
    try:
        return plain(value, place)
    except NotPlain as error:
        raise ConfigError(problem(error.path, error.type)) from None


def plain(value: Any, path: str = "") -> Any:
    """Return a value with plain types in place of others, or raise NotPlain.

    Containers stay what they are where loading allows it; a configuration's list becomes a list, a
    frozenset a set, and a dataclass, a namespace or any other mapping a dict. NumPy's scalars
    become Python's, a Path its text, and an enum its value. `restored` turns what NumPy's arrays
    (of text: lists) and deques become into these again.
    """
    if type(value) in _KEPT:
        return value
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        value = value.detach()
        # torch.save would write all of what a view is of
        is_view = value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_view else value
    if isinstance(value, Container):
        return plain(OmegaConf.to_container(value, resolve=True), path)
    if isinstance(value, enum.Enum):
        return plain(value.value, path)
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return plain(value.item(), path)
    if isinstance(value, np.ndarray):
        return _plain_array(value, path)
    if isinstance(value, PurePath):
        return str(value)
    for base in _BUILT_IN:
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Namespace | SimpleNamespace):
        return plain(vars(value), path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return plain({field.name: getattr(value, field.name) for field in fields}, path)
    return _plain_container(value, path)


def _plain_array(array: np.ndarray, path: str) -> Any:
    if array.dtype.kind not in "biufc":
        return plain(array.tolist(), path)
    try:
        # a copy, as this machine reads
        return {NDARRAY: torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))}
    except TypeError:  # numbers of 128 bits
        raise NotPlain(path, array) from None


def restored(value: Any) -> Any:
    """Return a loaded checkpoint with NumPy arrays, deques and defaultdicts where there were some
    when it was saved.
    """
    if type(value) in (dict, OrderedDict):
        if value.keys() == DEQUE:
            return deque(map(restored, value["__deque__"]), value["maxlen"])
        if value.keys() == DEFAULTS and value["factory"] in _FACTORIES:
            return defaultdict(_FACTORIES[value["factory"]], restored(value["__defaultdict__"]))
        if value.keys() == {NDARRAY}:
            return value[NDARRAY].numpy()
        return type(value)((key, restored(item)) for key, item in value.items())
    return type(value)(map(restored, value)) if type(value) in (list, tuple) else value


def _plain_container(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        entries = {
            _plain_key(key, f"{path}, key"): plain(item, f"{path}[{key!r}]")
            for key, item in value.items()
        }
        if isinstance(value, defaultdict) and value.default_factory in _FACTORIES.values():
            return {"__defaultdict__": entries, "factory": value.default_factory.__name__}  # pyright: ignore[reportOptionalMemberAccess]
        kept: Any = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kept(entries)
    if isinstance(value, list | tuple | deque):
        items = [plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, deque):
            return {"__deque__": items, "maxlen": value.maxlen}
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, set | frozenset):
        return {_plain_key(item, f"{path}, an element") for item in value}
    raise NotPlain(path, value)


def _plain_key(key: Any, path: str) -> Any:
    """Return a key or an element of a set made plain.

    A frozenset would become a set, which can be neither.
    """
    made = plain(key, path)
    if not isinstance(made, Hashable):
        raise NotPlain(path, key)
    return made


def plain_checkpoint(
    checkpoint: Mapping[str, Any], *, module: L.LightningModule | None = None
) -> dict[str, Any]:
    """Return a checkpoint's entries made plain.

    Hyperparameters that cannot be made plain, such as the factories that a task's constructor
    takes, are left out with one warning, and secret ones are masked; so is what the hook
    `on_save_checkpoint` of the `module` gives, often such factories, too: see `remake`. Anything
    else raises a ConfigError that names the keys.
    """
    result: dict[str, Any] = {}
    failed: dict[str, NotPlain] = {}
    for key, value in checkpoint.items():
        if key in _HYPER_PARAMETER_TYPES:
            continue
        try:
            made = _plain_hyper_parameters if key in HYPER_PARAMETERS else plain
            result[key] = made(value, f"[{key!r}]")
        except NotPlain as error:
            failed[key] = error
    given = _of_hook(module, checkpoint, without=failed) if module and failed else {}
    if problems := [
        problem(f"checkpoint{error.path}", error.type)
        for key, error in failed.items()
        if key not in given
    ]:
        raise ConfigError(problems)
    for key, error in failed.items():
        _warn_once(
            f"checkpoint{error.path} is a {error.type}, which no checkpoint can hold: loading it "
            f"would run code. A resume takes checkpoint['{key}'] from on_save_checkpoint of the "
            "module that it builds. If training changes it, put numbers, text, lists, dicts or "
            "tensors there instead."
        )
    return result | ({REMADE: [*failed]} if failed else {})


def _of_hook(
    module: L.LightningModule, checkpoint: Mapping[str, Any], *, without: Iterable[str] = ()
) -> dict[str, Any]:
    """Return a checkpoint as the module's hook makes it of the other entries."""
    given = {k: {**v} if isinstance(v, dict) else v for k, v in checkpoint.items()}
    for key in without:
        del given[key]
    given |= {"state_dict": module.state_dict()}
    given.setdefault("hyper_parameters", {**module.hparams})
    module.on_save_checkpoint(given)
    return given


def remake(module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Put the entries into a loaded checkpoint that could not be saved, as the hook of the module
    that was built anew gives them.
    """
    if names := checkpoint.pop(REMADE, ()):
        given = _of_hook(module, checkpoint)
        checkpoint |= {name: given[name] for name in names if name in given}


def problem(place: str, kind: str) -> str:
    """Return what is wrong with a value of a type at a place, and what to do."""
    advice = (
        "put numbers, text, lists, dicts or tensors there instead, and build the object "
        "again on loading"
    )
    if "DTensor" in kind:
        advice = "keep it in a buffer, or type strategy=ddp (an average: callbacks=ema)"
    return (
        f"{place} is a {kind}, which no checkpoint can hold: loading it would run code. "
        f"Remedy: {advice}."
    )


def _plain_hyper_parameters(parameters: Any, path: str) -> dict[str, Any]:
    result = {}
    for key in parameters:
        silence = f"To silence this: self.save_hyperparameters(ignore=['{key}'])."
        try:
            value = plain(parameters[key], str(key))
            result[plain(key)] = made = values.without_secrets(value, name=str(key))
            if repr(made) != repr(value):
                _warn_once(
                    f"save_hyperparameters: '{key}' holds a secret by its name: checkpoints hold "
                    f"{MASK} in its place. {silence}"
                )
        except NotPlain as error:
            if not error.type.startswith("hydra."):  # what only a configuration makes
                _warn_once(
                    f"save_hyperparameters: '{error.path}' is a {error.type}, which no checkpoint "
                    "can hold. It is left out; armature.load builds it from the run's "
                    f"config.yaml. {silence}"
                )
    return result


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)
