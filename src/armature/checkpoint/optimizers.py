"""The state of optimizers, for all layouts.

By weight and key: each value is the entry ".optimizer_states.<i>.<parameter name>.<key>". A tensor
of the weight's size is sharded as the weight; containers are one entry as bytes. Parameter groups
are in meta.pt, as hyperparameters with parameter names.

An optimizer that keeps more than torch's entries by weight is saved whole: a checkpoint holds its
state dict.

torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` would not do. They make a step to
create state, so that a weight without a gradient so far counts a step that it has not made (Adam,
SGD with dampening), and an optimizer that changes weights at rate 0 does so at each save. They
refuse lists, and lose the state of frozen weights, keys that hooks put into groups, and empty
groups.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from armature.checkpoint import changes, plain, state, storage
from armature.checkpoint.state import GRADIENTS, OPTIMIZER_TENSORS, RESERVED
from armature.errors import ConfigError
from armature.parallel import whole_weights

# in an entry of meta.pt, which holds parameter groups or a whole state
CLASS = f"{RESERVED}class"
TENSORS = f"{RESERVED}tensors"  # moved to those of the checkpoint while it is saved
# in a saved parameter group; BUILT also in a whole state, and only there in an entry
NAMES = f"{RESERVED}names"  # of its parameters
ADDED = f"{RESERVED}added"  # a hook had added it while the run trained
BUILT = f"{RESERVED}built"  # settings as the run's last start had built them
INNER = f"{RESERVED}inner"  # states of the optimizers that one holds
# they select how a step is computed on this machine, not its result, so they are never read from a
# checkpoint
RUNTIME_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


def class_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def check(optimizer: Optimizer, names: Mapping[Tensor, str], *, held: Collection[str]) -> None:
    """Raise ConfigError if no checkpoint would hold what an optimizer steps.

    Args:
        names: of the parameters that the module holds.
        held: names in the module's state dict. It may leave out parameters that are frozen.
    """
    start = f"configure_optimizers: {type(optimizer).__name__}"
    for param, _ in _params(optimizer):
        if param not in names:
            raise ConfigError(
                f"{start} steps a tensor of size {tuple(param.shape)} that is no parameter of the "
                "module: no checkpoint would hold it, and no strategy would reduce its gradient. "
                "Make it an nn.Parameter and an attribute of the module; keep several modules or "
                "parameters in nn.ModuleDict, ModuleList, ParameterDict or ParameterList."
            )
        if param.requires_grad and names[param] not in held:
            raise ConfigError(
                f"{start} trains {names[param]}, which the module's state_dict leaves out: no "
                "checkpoint would hold it. Let state_dict return it, or freeze it "
                "(requires_grad_(False)) in __init__ or configure_model."
            )


def _params(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    return [(param, group) for group in optimizer.param_groups for param in group["params"]]


# ---------------------------------------------------------------- entries
def by_weight(optimizer: Optimizer, names: Mapping[Tensor, str], *, index: int) -> dict[str, Any]:
    """Return the state of each parameter as `.optimizer_states.<index>.<name>.<key>`, without
    copies of tensors.

    Raises:
        ConfigError: the state holds an object that no checkpoint can hold.
    """
    place = f"{type(optimizer).__name__}.state"
    return {
        f"{OPTIMIZER_TENSORS}.{index}.{names[param]}.{key}": _entry(value, f"{place}[{key!r}]")
        for param, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def _entry(value: Any, place: str) -> Any:
    if isinstance(value, Tensor):
        return value
    whole = tree_map(whole_weights.whole, value)
    made = plain.require_plain(whole, place)
    return made if isinstance(made, int | float | None) else storage.dumped(made)


def value_of(entry: Any, param: Tensor | None = None) -> Any:
    """Return the value of an entry that was read, its tensors sharded and placed as a parameter."""

    def placed(leaf: Any) -> Any:
        if param is None or not isinstance(leaf, Tensor):
            return leaf
        return whole_weights.sharded_like(
            _zeros(param, leaf.shape, leaf.dtype), leaf.to(param.device)
        )

    if not isinstance(entry, bytes):
        return entry
    return tree_map(placed, plain.restored(storage.loaded(entry)))


def entry_names(saved: Iterable[str], index: int) -> dict[str, list[str]]:
    """Return the names of an optimizer's entries in a checkpoint, by the parameter's name."""
    found: dict[str, list[str]] = {}
    prefix = f"{OPTIMIZER_TENSORS}.{index}."
    for full in saved:
        if full.startswith(prefix):
            found.setdefault(full.removeprefix(prefix).rpartition(".")[0], []).append(full)
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
        {NAMES: of_group} | own for own, of_group in zip(settings(optimizer), names, strict=True)
    ]
    for number, group in enumerate(groups):
        if number < len(built):
            group[BUILT] = built[number]
        elif built:
            group[ADDED] = number  # a number: stages of a pipeline merge equal groups
    return groups


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return each group's hyperparameters as they are now, made plain: a rate that NumPy computes
    is a float.
    """
    return [
        {
            key: plain.require_plain(value, f"{type(optimizer).__name__}'s {key}")
            for key, value in group.items()
            if key not in ("params", *RUNTIME_OPTIONS)
        }
        for group in optimizer.param_groups
    ]


def settings_of(saved: Mapping[str, Any], built: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the hyperparameters of a saved group, also the keys that hooks had put into it.

    Args:
        built: the group's settings as they are built now. Those that differ from what the run had
            built have been changed by its user and take the place of the saved ones.
    """
    found = {key: value for key, value in saved.items() if not str(key).startswith(RESERVED)}
    then = saved.get(BUILT)
    if not (built and then):
        return found
    # the rate follows the one that it was computed from, in proportion, also if the schedule has
    # been taken away. OneCycleLR's `initial_lr` is a part of it. A first schedule begins with the
    # group's own rate
    keys = ("max_lr", "initial_lr", "lr") if "initial_lr" in then else ["lr"]
    before, after, own = (
        next((group[key] for key in keys if key in group), None) for group in (then, built, found)
    )
    # what on_load_checkpoint gave back to the module is what the group has already
    known = changes.same(before, after) or changes.same(own, after)
    if None not in (before, after) and not known:
        found["lr"] = found["lr"] / before * after if before else after
    return changes.merge(found, then=then, now=built, keep=["lr"])


def add_groups(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved: list[dict[str, Any]]
) -> None:
    """Add the groups that a hook had added while the run trained, unless a hook has already added
    them again.
    """
    own = dict(_params(optimizer))
    for group in saved:
        params = [p for p, name in names.items() if name in group[NAMES] and p not in own]
        if params and ADDED in group:
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
    for group in chain(*groups_of_ranks):
        known = next((known for known in merged if known | {NAMES: group[NAMES]} == group), None)
        if not known:
            merged.append(group | {NAMES: [*group[NAMES]]})
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
        known = next((by_name[name] for name in of_group if name in by_name), {})
        group.update(settings_of(known if of_group else at_place, now))


# ---------------------------------------------------------------- loading
def load_optimizers(
    checkpoint: Path,
    module: nn.Module,
    optimizers: list[Optimizer],
    *,
    saved: Sequence[Mapping[str, Any]],
    built: Sequence[Sequence[Mapping[str, Any]]] = (),
    extra: Mapping[str, Tensor] = {},
) -> dict[Tensor, Tensor]:
    """Load the optimizers' state, and return the gradients that were saved with it, by parameter.

    A weight that had no gradient before the save has no state, as it had then.

    Args:
        saved: each optimizer's entry in meta.pt.
        built: each optimizer's groups as they are built now.
        extra: further tensors to fill if the checkpoint has them, such as the averaged weights.
    """
    held = storage.read_metadata(checkpoint).state_dict_metadata
    names = state.parameter_names(module)
    targets: dict[str, Any] = {name: value for name, value in extra.items() if name in held}
    gradients: dict[Tensor, Tensor] = {}
    places: list[tuple[Any, Any, Tensor, str]] = []  # where values go, and their names
    for param, name in names.items() if optimizers else ():
        if (key := f"{GRADIENTS}{name}") in held:
            targets[key] = _target(param, {}, held[key], held.get(name))
            places.append((gradients, param, param, key))
    for index, (optimizer, entry) in enumerate(zip(optimizers, saved, strict=False)):
        now = built[index] if index < len(built) else ()
        if BUILT in entry:
            load_whole(optimizer, entry, now)
            continue
        own = entry_names(held, index)
        if own:
            _check_class(checkpoint, optimizer, entry.get(CLASS))
        add_groups(optimizer, names, entry["param_groups"])
        optimizer.state.clear()
        for param, group in _params(optimizer):
            for full in own.get(names[param], ()):
                name = full.rpartition(".")[2]
                targets[full] = _target(param, group, held[full], held.get(names[param]), name)
                places.append((optimizer.state[param], name, param, full))
        restore_groups(optimizer, group_names(optimizer, names), entry["param_groups"], now)
    storage.read_tensors(checkpoint, targets)
    for owner, key, param, name in places:
        owner[key] = value_of(targets[name], param)
    return gradients


def _check_class(checkpoint: Path, optimizer: Optimizer, saved: str | None) -> None:
    own = class_of(optimizer)
    # by name: the file of a user's class may have moved
    if saved and own.rpartition(".")[2] != saved.rpartition(".")[2]:
        raise ConfigError(
            f"{checkpoint} was saved with another optimizer: it holds the state of {saved}, and "
            f"configure_optimizers returns {own}. Resume with that optimizer. If a hook changed "
            "it during the run, let configure_optimizers return the new one: restore what it reads "
            "in on_load_checkpoint."
        )


def _target(
    param: Tensor, group: Mapping[str, Any], saved: Any, weight: Any, name: str = ""
) -> Tensor | None:
    """Return what to read an entry into: a tensor of the weight's size is sharded as the weight.

    What had the type of the saved `weight` gets that of the parameter, which the precision or
    DeepSpeed, whose weights are fp32, may have changed: optimizers refuse to mix types.
    """
    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype, size = saved.properties.dtype, saved.size
    if name != "step":  # which torch keeps as it is, too
        if weight and dtype == weight.properties.dtype:
            dtype = param.dtype
    elif size != param.shape and not counts_on_device(group):
        return torch.zeros(size, dtype=dtype)  # on the CPU, as torch's
    return _zeros(param, size, dtype)


def _zeros(param: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros on a parameter's device, sharded as it if they are of its size."""
    if size == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if not size:
        return torch.zeros(size, dtype=dtype, device=param.device)
    return param.detach().new_zeros(size, dtype=dtype)


def counts_on_device(group: Mapping[str, Any]) -> bool:
    """Return whether the kernels of a group read its number of steps on the device of its
    weights.
    """
    return bool(group.get("fused") or group.get("capturable"))


# ---------------------------------------------------------------- saved whole
def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer computes the loss itself (LBFGS).

    Its state has no tensor per weight.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def is_saved_whole(optimizer: Any) -> bool:
    """Return whether a checkpoint holds an optimizer's state dict as it is, instead of its tensors
    by weight.

    A user's optimizer may save more than torch's entries (Lookahead's slow weights), steps others
    that it holds (SAM), or have state that belongs to no weight.
    """
    if needs_closure(optimizer) or not isinstance(optimizer, Optimizer):  # DeepSpeed's
        return needs_closure(optimizer)
    if _inner(optimizer) or not all(
        isinstance(param, Tensor)
        and isinstance(entry, dict)
        and all(f"{key}".isidentifier() for key in entry)
        for param, entry in optimizer.state.items()
    ):
        return True
    if type(optimizer).state_dict is Optimizer.state_dict:
        return False
    own = optimizer.state_dict()
    # or it keeps its state elsewhere
    return own.keys() != {"state", "param_groups"} or len(own["state"]) != len(optimizer.state)


def refuse_parts(optimizer: Any) -> None:
    """Raise ConfigError for an optimizer that is saved whole, of a model that is sharded.

    Lightning's stand-in for no optimizer has no state.
    """
    if optimizer.state_dict():
        raise ConfigError(
            f"{type(optimizer).__name__} needs the whole model on every rank. Type "
            "strategy=single or strategy=ddp."
        )


def _inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that another one holds as attributes, or in lists and dicts of them."""
    found: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        several = value if type(value) is dict else dict(enumerate(value)) if type(value) in (
            list, tuple) else {"": value}  # fmt: skip
        found |= {
            f"{name}.{place}": each
            for place, each in several.items()
            if isinstance(each, Optimizer)
        }
    return found


def whole_state(optimizer: Optimizer, built: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return its state dict, with those of the optimizers it holds unless its own `state_dict`
    cares for them.

    Args:
        built: the settings of its groups when it was built.
    """
    own = {**optimizer.state_dict(), BUILT: [*built]}
    if type(optimizer).state_dict is Optimizer.state_dict:
        own[INNER] = {
            name: whole_state(each)
            for name, each in _inner(optimizer).items()
            if each.state is not optimizer.state
        }
    return own


def load_whole(
    optimizer: Optimizer, saved: Mapping[str, Any], built: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Load what `whole_state` returned. Groups and states that optimizers share stay shared."""
    held, then = saved.get(INNER, {}), saved.get(BUILT, ())
    own = {key: value for key, value in saved.items() if key not in (INNER, BUILT, CLASS)}
    methods = (type(optimizer).state_dict, type(optimizer).load_state_dict)
    if methods == (Optimizer.state_dict, Optimizer.load_state_dict):
        _load_in_place(optimizer, own)
    else:
        optimizer.load_state_dict(own)
    for group, old, new in zip(optimizer.param_groups, then, built, strict=False):
        group.update(settings_of(group | {BUILT: old}, new))
    known = _inner(optimizer)
    for name in held.keys() & known:
        load_whole(known[name], held[name])


def _load_in_place(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict of torch's own into the groups and the state that there are.

    torch's method makes new ones, gives each tensor the type of its weight, and leaves what belongs
    to no weight on the CPU.
    """
    params = _params(optimizer)
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, params, strict=True))
    optimizer.state.clear()
    for key, entry in saved["state"].items():
        param, group = by_number.get(key, params[0])
        moved = move_data_to_device(entry, param.device)
        if key in by_number and "step" in entry and not counts_on_device(group):
            moved["step"] = entry["step"]
        optimizer.state[param if key in by_number else key] = moved
    for group, new in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(new | {"params": group["params"]})
