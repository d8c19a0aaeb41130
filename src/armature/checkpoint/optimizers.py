"""The state of optimizers by weight and key, for all layouts; whole_optimizers.py has those that
keep more.

A tensor or number is the entry ".optimizer_states.<i>.<parameter name>.<key>". Any other value is
one entry too, as bytes, in which `{"__tensor__": n}` stands for each of its tensors, and these are
the entries "<key>/<n>". Parameter groups are in meta.pt, as hyperparameters with parameter names.

torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` would not do. They make a step to
create state, so that a weight without a gradient so far counts a step that it has not made (Adam,
SGD with dampening), and an optimizer that changes weights at rate 0 does so at each save. They
refuse lists, and lose the state of frozen weights, keys that hooks put into groups, and empty
groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_structure

from armature.checkpoint import changes, plain, state, storage
from armature.checkpoint.state import GRADIENTS, OPTIMIZER_TENSORS, RESERVED
from armature.errors import ConfigError

CLASSES = f"{RESERVED}optimizer_classes"  # in meta.pt: by index
NAMES = "names"  # in a saved parameter group: of its parameters
ADDED = "added"  # in a saved parameter group: a hook had added it while the run trained
BUILT = "built"  # in a saved parameter group: its settings as the run's last start had built them
_USERS = "users:"  # in a saved parameter group: before a user's keys of these names
_TENSOR = "__tensor__"  # the only key of a dict that stands for a tensor
# they select how a step is computed on this machine, not its result, so they are never read from a
# checkpoint
RUNTIME_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


def class_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


# ---------------------------------------------------------------- entries
def by_weight(optimizer: Optimizer, names: Mapping[Tensor, str], *, index: int) -> dict[str, Any]:
    """Return the state of each parameter as `.optimizer_states.<index>.<name>.<key>`, without
    copies of tensors.

    Raises:
        ConfigError: the state holds an object that no checkpoint can hold.
    """
    found = {}
    try:
        for param, of_param in optimizer.state.items():
            for key, value in of_param.items():
                name = f"{_prefix(index, names[param])}{_escaped(key)}"
                found |= _entries(name, value, str(key))
    except plain.NotPlain as error:
        raise ConfigError(
            plain.problem(f"{type(optimizer).__name__}.state: {error.path}", error.type)
        ) from None
    return found


def _escaped(key: Any) -> str:
    if type(key) is int:
        return f"{{{key}}}"
    if not isinstance(key, str):
        raise plain.NotPlain(f"key {key!r}", key)
    return quote(key, safe="").replace(".", "%2E")


def _prefix(index: int, name: str) -> str:
    return f"{OPTIMIZER_TENSORS}.{index}.{name}."


def _entries(name: str, value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {name: value}
    tensors: list[Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return {_TENSOR: len(tensors) - 1}

    form = tree_map(take, value)
    made = plain.plain(form, key)
    if tree_structure(plain.restored(made)) != tree_structure(form):
        raise plain.NotPlain(key, value)  # it would come back as another type
    made = made if isinstance(made, int | float | None) else storage.dumped(made)
    return {name: made} | {f"{name}/{number}": tensor for number, tensor in enumerate(tensors)}


def joined(entries: Mapping[str, Any]) -> dict[Any, Any]:
    """Return a weight's state by key from its entries, whose names are without the weight's."""

    def stands_for_tensor(value: Any) -> bool:
        return isinstance(value, dict) and value.keys() == {_TENSOR}

    def value_of(name: str, entry: Any) -> Any:
        return tree_map(
            lambda leaf: entries[f"{name}/{leaf[_TENSOR]}"] if stands_for_tensor(leaf) else leaf,
            plain.restored(storage.loaded(entry)) if isinstance(entry, bytes) else entry,
            is_leaf=stands_for_tensor,
        )

    return {
        int(name[1:-1]) if name[0] == "{" else unquote(name): entry
        if isinstance(entry, Tensor)
        else value_of(name, entry)
        for name, entry in entries.items()
        if "/" not in name
    }


def entry_names(saved: Iterable[str], index: int) -> dict[str, list[str]]:
    """Return the names of an optimizer's entries in a checkpoint, by the parameter's name."""
    found: dict[str, list[str]] = {}
    prefix = f"{OPTIMIZER_TENSORS}.{index}."
    for full in saved:
        if full.startswith(prefix):
            param, _, name = full.removeprefix(prefix).rpartition(".")
            found.setdefault(param, []).append(name)
    return found


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
    # numbered: stages of a pipeline merge equal groups
    for number, group in enumerate(groups[len(built) :] if built else (), start=1):
        group[ADDED] = number
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
    """Load the optimizers' state, and return the gradients that were saved with it, by parameter.

    A weight that had no gradient before the save has no state, as it had then.

    Args:
        groups: each optimizer's parameter groups, as saved; one without them keeps its state.
        classes: the optimizers' classes, as saved.
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
    restored = []
    for index, (optimizer, of_optimizer) in enumerate(zip(optimizers, groups, strict=False)):
        if of_optimizer is None:
            continue
        own = entry_names(saved, index)
        if own:
            _check_class(checkpoint, optimizer, classes[index : index + 1])
        add_groups(optimizer, names, of_optimizer)
        states = {
            param: {
                name: _target(param, group, saved[_prefix(index, names[param]) + name], name)
                for name in own[names[param]]
            }
            for param, group in _params(optimizer)
            if names[param] in own
        }
        for param, entries in states.items():
            prefix = _prefix(index, names[param])
            targets |= {prefix + name: target for name, target in entries.items()}
        restored.append((index, optimizer, of_optimizer, states))
    gradients = {
        param: key
        for param, name in names.items()
        if optimizers and (key := f"{GRADIENTS}{name}") in saved
    }
    for param, key in gradients.items():
        targets[key] = _target(param, {}, saved[key], key)
    storage.read_tensors(checkpoint, targets)
    for index, optimizer, of_optimizer, states in restored:
        optimizer.state.clear()
        for param, entries in states.items():
            prefix = _prefix(index, names[param])
            optimizer.state[param] = joined({name: targets[prefix + name] for name in entries})
        now = built[index] if index < len(built) else ()
        restore_groups(optimizer, group_names(optimizer, names), of_optimizer, now)
    return {
        param: storage.loaded(found).to(param.device)
        if isinstance(found := targets[key], bytes)
        else found
        for param, key in gradients.items()
    }


def _params(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    return ((param, group) for group in optimizer.param_groups for param in group["params"])


def _check_class(checkpoint: Path, optimizer: Optimizer, saved: Sequence[str]) -> None:
    own = class_of(optimizer)
    # by name: the file of a user's class may have moved
    if saved and own.rpartition(".")[2] != saved[0].rpartition(".")[2]:
        raise ConfigError(
            f"{checkpoint} was saved with another optimizer: it holds the state of {saved[0]}, and "
            f"configure_optimizers returns {own}. Resume with the optimizer that the run began "
            "with."
        )


def _target(param: Tensor, group: Mapping[str, Any], saved: Any, name: str) -> Tensor | None:
    """Return what to read an entry into: a tensor of the weight's size is sharded as the weight."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype, size = saved.properties.dtype, saved.size
    if size == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if name == "step" and not counts_on_device(group):
        return torch.zeros(size, dtype=dtype)  # on the CPU, as torch's
    if not size:
        return torch.zeros(size, dtype=dtype, device=param.device)
    return param.detach().new_zeros(size, dtype=dtype)


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Return whether the kernels of a group read its number of steps on the device of its
    weights.
    """
    return bool(group.get("fused") or group.get("capturable"))
