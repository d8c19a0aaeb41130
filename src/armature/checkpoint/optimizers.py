"""The state of optimizers by weight and key, for all layouts; whole_optimizers.py has those that
keep more.

An entry is named ".optimizer_states.<i>.<parameter name>.<key>". The tensors of a list or dict are
entries of their
own, whose keys are paths: "Q/[0]". Parameter groups are in meta.pt, as hyperparameters with
parameter names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
import torch.optim.optimizer as torchs
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from armature.checkpoint import changes, misfit, plain, state, storage
from armature.checkpoint.state import GRADIENTS, OPTIMIZER_TENSORS, RESERVED, SPARSE_GRADIENTS
from armature.errors import ConfigError, error_line

CLASSES = f"{RESERVED}optimizer_classes"  # in meta.pt: by index
NAMES = "names"  # in a saved parameter group: of its parameters
ADDED = "added"  # in a saved parameter group: a hook had added it while the run trained
BUILT = "built"  # in a saved parameter group: its settings as the run's last start had built them
_USERS = "users:"  # in a saved parameter group: before a user's keys of these names
# modules of optimizers
_KEEP_WEIGHTS_AT_RATE_0 = ("torch.optim.", "armature.optim.", "bitsandbytes.")
_CONTAINERS = (dict, OrderedDict, list, tuple)
# they select how a step is computed on this machine, not its result, so they are never read from a
# checkpoint
RUNTIME_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


def class_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


# ---------------------------------------------------------------- saving
def by_weight(optimizer: Optimizer, names: Mapping[Tensor, str], *, index: int) -> dict[str, Any]:
    """Return the state of each parameter as `.optimizer_states.<index>.<name>.<key>`, without
    copies of tensors.

    Raises:
        ConfigError: the state holds an object that no checkpoint can hold.
    """
    found = {}
    try:
        for param, entries in optimizer.state.items():
            prefix = f"{OPTIMIZER_TENSORS}.{index}.{names[param]}."
            for key, value in entries.items():
                found |= {prefix + path: leaf for path, leaf in _leaves(value, _escaped(key))}
    except plain.NotPlain as error:
        raise ConfigError(
            plain.problem(f"{type(optimizer).__name__}.state: {error.path}", error.type)
        ) from None
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return the tensors and plain values of which a value consists, by path."""
    given = value
    if not isinstance(value, Tensor) and type(value) not in _CONTAINERS:
        value = plain.plain(value, path)
    if isinstance(value, dict) and type(value) in (dict, OrderedDict):
        items, empty = [(_escaped(key, path), item) for key, item in value.items()], "{}"
    elif isinstance(value, list | tuple) and type(given) in (list, tuple):
        form, empty = ("[{}]", "[]") if isinstance(value, list) else ("({})", "()")
        items = [(form.format(number), item) for number, item in enumerate(value)]
    elif isinstance(value, Mapping | list | tuple | set):  # it would come back as another type
        raise plain.NotPlain(path, given)
    else:
        yield path, value
        return
    if not items:
        yield f"{path}/{empty}", None
    for key, item in items:
        yield from _leaves(item, f"{path}/{key}")


def _escaped(key: Any, path: str = "") -> str:
    if type(key) is int:
        return f"{{{key}}}"
    if not isinstance(key, str) or not key:
        raise plain.NotPlain(f"{path}, key {key!r}", key)
    return quote(key, safe="").replace(".", "%2E")


def nested(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Return by key the values of whose parts `by_weight` makes entries."""
    return {
        int(key[1:-1]) if key.startswith("{") else unquote(key): plain.restored(value)
        for key, value in _joined(leaves).items()
    }


def _joined(leaves: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        key, _, rest = path.partition("/")
        parts.setdefault(key, {})[rest] = leaf
    return {key: own[""] if "" in own else _container(own) for key, own in parts.items()}


def _container(leaves: Mapping[str, Any]) -> Any:
    first = next(iter(leaves))
    if first in ("{}", "[]", "()"):
        return {"{}": {}, "[]": [], "()": ()}[first]
    if first[0] not in "[(":
        return nested(leaves)
    items = sorted(_joined(leaves).items(), key=lambda item: int(item[0][1:-1]))
    return (list if first[0] == "[" else tuple)(plain.restored(value) for _, value in items)


# ---------------------------------------------------------------- parameter groups
def group_names(optimizer: Optimizer, names: dict[Tensor, str]) -> list[list[str]]:
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def param_groups(
    optimizer: Optimizer, names: list[list[str]], built: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return each group's hyperparameters and the names of its parameters.

    Args:
        built: the groups' settings when they were built; those that hooks added have none.
    """
    groups = [
        {NAMES: of_group} | _settings(group)
        for group, of_group in zip(optimizer.param_groups, names, strict=True)
    ]
    for group, settings in zip(groups, built, strict=False):
        group[BUILT] = dict(settings)
    return groups


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return each group's hyperparameters as they are now."""
    return [_settings(group) for group in optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters made plain: a rate that NumPy computes is a float."""
    own = {
        f"{_USERS}{key}" if key in (NAMES, ADDED, BUILT) else key: value
        for key, value in group.items()
        if key != "params" and key not in RUNTIME_OPTIONS
    }
    return plain.plain_checkpoint({"a parameter group of an optimizer": own})[
        "a parameter group of an optimizer"
    ]


def settings_of(saved: Mapping[str, Any], built: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the hyperparameters of a saved group, also the keys that hooks had put into it.

    Args:
        built: the group's settings as they are built now. Those that differ from what the run had
            built have been changed by its user and take the place of the saved ones.
    """
    found = {key: value for key, value in saved.items() if key not in (NAMES, ADDED, BUILT)}
    then = saved.get(BUILT)
    if built is not None and then is not None:
        found = changes.merge(found, then=then, now=built, keep=("lr",))
        found |= _rate(found, then, built)
    return {key.removeprefix(_USERS): value for key, value in found.items()}


def _rate(
    saved: Mapping[str, Any], then: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the learning rate if the rate that it was computed from has changed: in proportion."""
    key = "initial_lr" if "initial_lr" in then and "initial_lr" in now else "lr"
    before, after = then.get(key), now.get(key)
    if before is None or after is None or changes.same(before, after):
        return {}
    return {"lr": after if not before else saved["lr"] / before * after}


def add_groups(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved: list[dict[str, Any]]
) -> None:
    """Add the groups that a hook had added while the run trained, unless a hook has already added
    them again.
    """
    own = {param for group in optimizer.param_groups for param in group["params"]}
    for group in (group for group in saved if group.get(ADDED)):
        params = [
            param for param, name in names.items() if name in group[NAMES] and param not in own
        ]
        if params:
            optimizer.add_param_group({"params": params, **settings_of(group)})


def merge_groups(groups_of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the groups of all pipeline stages into those of the unsharded model, by equal
    hyperparameters.
    """
    names = [[group[NAMES] for group in groups] for groups in groups_of_ranks]
    # without stages; groups without parameters keep their places
    if all(of_rank == names[0] for of_rank in names):
        return groups_of_ranks[0]
    merged: list[dict[str, Any]] = []
    for group in (group for groups in groups_of_ranks for group in groups):
        known = next((known for known in merged if known | {NAMES: group[NAMES]} == group), None)
        if known is None:
            merged.append(group | {NAMES: list(group[NAMES])})
        else:
            known[NAMES] += [name for name in group[NAMES] if name not in known[NAMES]]
    return merged


def restore_groups(
    optimizer: Optimizer,
    names: list[list[str]],
    saved: list[dict[str, Any]],
    built: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Restore hyperparameters by parameter name: the order of groups and of parameters may have
    changed.

    Those of a group without parameters, such as a frozen backbone's, by its place.

    Args:
        built: the groups' settings as they are built now; see `settings_of`.
    """
    by_name = {name: group for group in saved for name in group[NAMES]}
    by_place = saved if len(saved) == len(names) else [{}] * len(names)  # stages were merged
    groups = zip(optimizer.param_groups, names, by_place, strict=True)
    for (group, of_group, at_place), now in zip_longest(groups, built[: len(names)]):
        known = next(
            (by_name[name] for name in of_group if name in by_name), {} if of_group else at_place
        )
        group.update(settings_of(known, now))


# ---------------------------------------------------------------- loading
def create_state(optimizer: Optimizer, *, held: Set[Tensor] = frozenset()) -> None:
    """Create the state tensors of an optimizer that has not stepped yet, to load into.

    Weights that are `held` get state although they are frozen now: they were trained before. What
    the optimizer's own
    step raises is raised.
    """
    if optimizer.state:
        return
    # by a step with zero gradients and learning rate zero: only the optimizer knows shapes, types
    # and placements
    before = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    # schedule-free ones refuse to step otherwise
    if callable(train := getattr(optimizer, "train", None)):
        train()
    for group in optimizer.param_groups:
        if "eps" in group and group["eps"] == 0:  # Adam's update would be 0 / 0
            group["eps"] = 1e-8
        if (rate := group.get("lr")) is not None:  # else the optimizer computes its steps' size
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param) if param.requires_grad or param in held else None
            # it takes no dense ones
            if isinstance(optimizer, torch.optim.SparseAdam) and param.grad is not None:
                param.grad = param.grad.to_sparse()
    # others may scale, round or project weights whatever the rate is
    known = type(optimizer).__module__.startswith(_KEEP_WEIGHTS_AT_RATE_0)
    params = (
        [] if known else [param for group in optimizer.param_groups for param in group["params"]]
    )
    kept = [(param, param.detach().clone()) for param in params]
    try:
        with _without_hooks(optimizer):
            optimizer.step()
    finally:
        with torch.no_grad():
            for param, value in kept:
                param.copy_(value)
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Keep away the hooks around a step: a user's may move an average, or count."""
    hooks = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    hooks += [torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks]
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, before, strict=True):
            each.update(own)


def load_optimizers(
    checkpoint: Path,
    module: nn.Module,
    optimizers: list[Optimizer],
    *,
    groups: list[list[dict[str, Any]] | None],
    classes: Sequence[str] = (),
    built: Sequence[Sequence[Mapping[str, Any]]] = (),
    extra: dict[str, Tensor] | None = None,
) -> dict[Tensor, Tensor]:
    """Load the optimizers' state in place, and return the gradients that were saved with it, by
    parameter.

    Args:
        groups: each optimizer's parameter groups, as saved; one without them keeps its state.
        classes: the optimizers' classes, as saved. One of the same class gets what was saved, also
            if its first step does not create all of it.
        built: each optimizer's groups as they are built now.
        extra: further tensors to fill if the checkpoint has them, such as the averaged weights.
    """
    saved, names = (
        storage.read_metadata(checkpoint).state_dict_metadata,
        state.parameter_names(module),
    )
    targets: dict[str, Any] = {
        name: value for name, value in (extra or {}).items() if name in saved
    }
    restored = [
        (i, *pair)
        for i, pair in enumerate(zip(optimizers, groups, strict=False))
        if pair[1] is not None
    ]
    of_params: list[dict[str, list[str]]] = []
    for index, optimizer, of_optimizer in restored:
        keys = _keys(saved, index)
        of_params.append(keys)
        add_groups(optimizer, names, of_optimizer or [])
        own = {p for group in optimizer.param_groups for p in group["params"]}
        targets |= _targets(
            checkpoint,
            optimizer,
            saved,
            index=index,
            params={names[p]: p for p in names if p in own},
            keys=keys,
            same=index < len(classes) and classes[index] == class_of(optimizer),
            names=names,
        )
    gradients = {
        p: torch.zeros_like(p)
        for p, name in names.items()
        if optimizers and f"{GRADIENTS}{name}" in saved
    }
    targets |= {f"{GRADIENTS}{names[param]}": gradient for param, gradient in gradients.items()}
    sparse = {param: _of_sparse(saved, param, name) for param, name in names.items() if optimizers}
    targets |= {key: tensor for tensors in sparse.values() for key, tensor in tensors.items()}
    state.check_sizes(checkpoint, saved, targets)
    storage.read_tensors(checkpoint, targets)
    for (index, optimizer, of_optimizer), keys in zip(restored, of_params, strict=True):
        own = {p for group in optimizer.param_groups for p in group["params"]}
        optimizer.state.clear()
        for param, name in names.items():
            if param in own and name in keys:  # else it had no gradient yet
                prefix = f"{OPTIMIZER_TENSORS}.{index}.{name}."
                optimizer.state[param] = nested({key: targets[prefix + key] for key in keys[name]})
        now = built[index] if index < len(built) else ()
        restore_groups(optimizer, group_names(optimizer, names), of_optimizer or [], now)
    for param, tensors in sparse.items():
        if tensors:
            indices, values = tensors.values()
            gradients[param] = torch.sparse_coo_tensor(indices, values, param.shape)
    return gradients


def _of_sparse(saved: Mapping[str, Any], param: Tensor, name: str) -> dict[str, Tensor]:
    """Return tensors to fill with a parameter's sparse gradient: its indices and values, or
    none.
    """
    keys = [f"{SPARSE_GRADIENTS}{name}.{part}" for part in ("indices", "values")]
    types = (torch.long, param.dtype)
    return {
        key: torch.empty(saved[key].size, dtype=dtype, device=param.device)
        for key, dtype in zip(keys, types, strict=True)
        if key in saved
    }


def _keys(saved: Iterable[str], index: int) -> dict[str, list[str]]:
    """Return the keys of a saved optimizer's state, by the parameter's name."""
    found: dict[str, list[str]] = {}
    prefix = f"{OPTIMIZER_TENSORS}.{index}."
    for name in saved:
        if name.startswith(prefix):
            param, _, key = name.removeprefix(prefix).rpartition(".")
            found.setdefault(param, []).append(key)
    return found


def _targets(
    checkpoint: Path,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    *,
    index: int,
    params: Mapping[str, Tensor],
    keys: Mapping[str, list[str]],
    same: bool,
    names: Mapping[Tensor, str],
) -> dict[str, Any]:
    """Return what to read an optimizer's saved state into: what its first step creates, or tensors
    like it.

    Args:
        params, keys: its parameters and the keys of their saved state, by the parameter's name.
        same: whether an optimizer of the same class has saved it.
    """
    failed = ""
    try:
        create_state(optimizer, held={params[name] for name in params.keys() & keys.keys()})
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it steps with a closure alone, or not with gradients of zero
        optimizer.state.clear()
        failed = f" (its step without gradients failed: {error_line(error)})"
    own = by_weight(optimizer, names, index=index)
    # not those of other stages of a pipeline
    of_own = {name: keys[name] for name in params.keys() & keys.keys()}
    _check_keys(checkpoint, of_own, _keys(own, index), own, index=index, same=same, failed=failed)
    found = {}
    for name in params.keys() & keys.keys():
        for key in keys[name]:
            path = f"{OPTIMIZER_TENSORS}.{index}.{name}.{key}"
            if not isinstance(saved[path], TensorStorageMetadata):
                found[path] = None
            elif isinstance(own.get(path), Tensor):
                found[path] = own[path]
            else:
                found[path] = _like(checkpoint, params[name], optimizer, saved[path], path)
    return found


def _like(
    checkpoint: Path, param: Tensor, optimizer: Optimizer, saved: TensorStorageMetadata, path: str
) -> Tensor:
    """Return a tensor for a saved one that the optimizer has not created: it is where the weight
    is.
    """
    dtype = saved.properties.dtype
    if tuple(saved.size) == tuple(param.shape):
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if isinstance(param, DTensor) and saved.size:
        raise ConfigError(
            f"{checkpoint}: {type(optimizer).__name__} keeps {path} of size {tuple(saved.size)} "
            "for a weight of size "
            f"{tuple(param.shape)}, which cannot be placed where weights are sharded. Resume with "
            "strategy=single or "
            "strategy=ddp."
        )
    group = next(
        group for group in optimizer.param_groups if any(each is param for each in group["params"])
    )
    # as torch's do
    counts_on_cpu = path.endswith(".step") and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(saved.size, dtype=dtype, device="cpu" if counts_on_cpu else param.device)


def _check_keys(
    checkpoint: Path,
    saved: Mapping[str, list[str]],
    own: Mapping[str, list[str]],
    values: Mapping[str, Any],
    *,
    index: int,
    same: bool,
    failed: str,
) -> None:
    """Raise ConfigError if the state of the parameters that both have has other keys, and so is
    another optimizer's.
    """

    def of_common(keys: Mapping[str, list[str]]) -> set[str]:
        common = saved.keys() & own.keys()
        return {key.partition("/")[0] for name in common for key in keys[name]}

    there, here = of_common(saved), of_common(own)
    if not same and saved and not own:
        there = {key.partition("/")[0] for of_param in saved.values() for key in of_param}
    elif there == here:
        return
    filled = {
        key.partition("/")[0] for name in own for key in own[name]
        if isinstance(values[f"{OPTIMIZER_TENSORS}.{index}.{name}.{key}"], Tensor)
    }  # fmt: skip
    if same and filled <= there:
        return
    raise ConfigError(
        f"{checkpoint} was saved with another optimizer: its state holds "
        f"{misfit.few(sorted(there))}, "
        f"this one's {misfit.few(sorted(here))}{failed}. Resume with the optimizer that the run "
        "began with."
    )
