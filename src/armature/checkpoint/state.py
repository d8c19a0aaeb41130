"""The state of a model and its optimizers, keyed by unsharded names, so that any layout reads what any other wrote.

Weights are keyed as in the unsharded LightningModule ("model.blocks.0.…"), optimizer state as
"optimizer_states.<i>.<parameter name>.<key>", and tensors of callbacks as "extra.<callback>.<name>". Parameter groups
are in meta.pt, as hyperparameters with parameter names.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from armature.checkpoint import directory, misfit, of_ranks, plain, resume, storage
from armature.errors import ConfigError
from armature.parallel import process_group

OPTIMIZER = "optimizer_states"
EXTRA = "extra"
WHOLE = "optimizer_state"  # in meta.pt, with its index: the state of an optimizer that calls the closure itself
GRADIENTS = f"{EXTRA}.grad."
RESERVED = (f"{OPTIMIZER}.", f"{EXTRA}.")
OTHER = "extra_state"  # in meta.pt: what modules keep beside tensors, by name
BUCKETS = "bucket_order"  # in meta.pt: of the gradients, where DDP reduces them
_EXTRA_STATE = "_extra_state"  # how torch names it in a state dict
ADDED = "added"  # in a saved parameter group: a hook had added it while the run trained
_KEEP_WEIGHTS_AT_RATE_0 = ("torch.optim.", "armature.optim.", "bitsandbytes.")  # modules of optimizers
# they select how a step is computed on this machine, not its result, so they are never read from a checkpoint
RUNTIME_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


def module_state(module: nn.Module, *, buffers: bool = True, others: bool = False) -> dict[str, Any]:
    """Return this rank's part of the parameters and persistent buffers, without copies.

    Args:
        buffers: include buffers (running statistics). They may differ between ranks: only one rank saves them.
        others: include what modules keep beside tensors, through torch's `get_extra_state`.
    """
    left_out = () if buffers else dict(module.named_buffers())
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
        if name not in left_out and (others or isinstance(value, Tensor))
    }


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Return each parameter's first name, through the state dict, which reshards gathered weights first."""
    names: dict[Tensor, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(value, name)
    return names


def optimizer_state(optimizer: Optimizer, names: dict[Tensor, str], *, index: int) -> dict[str, Any]:
    """Return the state of each parameter as `optimizer_states.<index>.<name>.<key>`, without copies."""
    return {
        f"{OPTIMIZER}.{index}.{names[param]}.{key}": value
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes the loss itself (LBFGS). Its state has no tensor per weight."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def is_saved_whole(optimizer: Optimizer) -> bool:
    """Return whether a checkpoint holds an optimizer's state dict as it is, instead of its tensors by weight.

    A user's optimizer may save more than torch's entries, such as Lookahead's slow weights or a wrapper's averages.
    """
    users = isinstance(optimizer, Optimizer) and type(optimizer).state_dict is not Optimizer.state_dict
    own = optimizer.state_dict() if users else {}  # DeepSpeed's are no Optimizer of torch's
    return needs_closure(optimizer) or not isinstance(own, Mapping) or bool(own.keys() - {"state", "param_groups"})


def pending_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return gradients as `extra.grad.<name>`: a step of manual optimization may use those of earlier batches too."""
    named = ((name, param.grad) for param, name in parameter_names(module).items())
    return {f"{GRADIENTS}{name}": gradient for name, gradient in named if gradient is not None}


def group_names(optimizer: Optimizer, names: dict[Tensor, str]) -> list[list[str]]:
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def param_groups(optimizer: Optimizer, names: list[list[str]]) -> list[dict[str, Any]]:
    """Return each group's hyperparameters and the names of its parameters."""
    return [
        {"names": of_group} | {k: v for k, v in group.items() if k != "params" and k not in RUNTIME_OPTIONS}
        for group, of_group in zip(optimizer.param_groups, names, strict=True)
    ]


def add_groups(optimizer: Optimizer, names: Mapping[Tensor, str], saved: list[dict[str, Any]]) -> None:
    """Add the groups that a hook had added while the run trained, unless a hook has already added them again."""
    own = {param for group in optimizer.param_groups for param in group["params"]}
    for group in (group for group in saved if group.get(ADDED)):
        params = [param for param, name in names.items() if name in group["names"] and param not in own]
        if params:
            settings = {key: value for key, value in group.items() if key not in ("names", ADDED)}
            optimizer.add_param_group({"params": params, **settings})


def merge_groups(groups_of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the groups of all pipeline stages into those of the unsharded model, by equal hyperparameters."""
    merged: list[dict[str, Any]] = []
    for group in (group for groups in groups_of_ranks for group in groups):
        known = next((known for known in merged if known | {"names": group["names"]} == group), None)
        if known is None:
            merged.append(group | {"names": list(group["names"])})
        else:
            known["names"] += [name for name in group["names"] if name not in known["names"]]
    return merged


def restore_groups(optimizer: Optimizer, names: list[list[str]], saved: list[dict[str, Any]]) -> None:
    """Restore hyperparameters by parameter name: the order of groups and of parameters may have changed."""
    by_name = {name: group for group in saved for name in group["names"]}
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        known = next((by_name[name] for name in of_group if name in by_name), {})
        group.update({k: v for k, v in known.items() if k in group and k != "names"})


def create_state(optimizer: Optimizer, *, held: Set[Tensor] = frozenset()) -> None:
    """Create the state tensors of an optimizer that has not stepped yet, to load into.

    Weights that are `held` get state although they are frozen now: they were trained before.
    """
    if optimizer.state:
        return
    # by a step with zero gradients and learning rate zero: only the optimizer knows shapes, types and placements
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if callable(train := getattr(optimizer, "train", None)):  # schedule-free ones refuse to step otherwise
        train()
    for group in optimizer.param_groups:
        if "eps" in group and group["eps"] == 0:  # Adam's update would be 0 / 0
            group["eps"] = 1e-8
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param) if param.requires_grad or param in held else None
            if isinstance(optimizer, torch.optim.SparseAdam) and param.grad is not None:  # it takes no dense ones
                param.grad = param.grad.to_sparse()
    # others may scale, round or project weights whatever the rate is
    known = type(optimizer).__module__.startswith(_KEEP_WEIGHTS_AT_RATE_0)
    params = [] if known else [param for group in optimizer.param_groups for param in group["params"]]
    kept = [(param, param.detach().clone()) for param in params]
    optimizer.step()
    with torch.no_grad():
        for param, value in kept:
            param.copy_(value)
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- loading weights
def load_weights(
    checkpoint: Path, module: nn.Module, *, strict: bool = True, may_lack: Callable[[str], bool] | None = None,
    grows: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Load the weights, in place if the names are the module's. Called by all ranks; as `place_weights`."""
    saved, own = storage.read_metadata(checkpoint).state_dict_metadata, module_state(module)
    known, held = _names_of_all_ranks(module.state_dict()), _weight_names(saved)
    lacking = {name for name in known - held if may_lack is None or not may_lack(name)}
    if lacking or held - known or any(name.endswith(_EXTRA_STATE) for name in known):
        weights = read_weights(checkpoint, module)
        return place_weights(checkpoint, module, weights, strict=strict, may_lack=may_lack, grows=grows)
    own = {name: value for name, value in own.items() if name in held}
    _check_sizes(checkpoint, saved, own)
    storage.read_tensors(checkpoint, dict(own))
    return {}


def read_weights(checkpoint: Path, module: nn.Module) -> dict[str, Any]:
    """Return a checkpoint's weights in new tensors, as far as this rank needs them. Called by all ranks.

    A tensor of the module's name and size is sharded as in the module; one that no rank knows is whole, on the CPU.
    """
    saved: dict[str, Any] = storage.read_metadata(checkpoint).state_dict_metadata
    own = module_state(module)
    unknown = _weight_names(saved) - _names_of_all_ranks(own)
    weights: dict[str, Any] = {}
    for name in (unknown | own.keys()) & saved.keys():
        if name in own and _size_of(saved[name]) == tuple(own[name].shape):
            weights[name] = torch.empty_like(own[name])
        else:
            weights[name] = torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
    storage.read_tensors(checkpoint, weights)
    return weights | plain.restored(storage.read_meta(checkpoint).get(OTHER, {}))


def place_weights(
    source: Path, module: nn.Module, weights: dict[str, Any], *, strict: bool = True,
    may_lack: Callable[[str], bool] | None = None, grows: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Load weights through torch's `load_state_dict`, and so with the hooks of modules. Called by all ranks.

    Return those of modules that are None, as one that `on_fit_start` makes: torch passes over them without a word.
    With `grows` also those that the module lacks.

    Args:
        source: where the weights come from, for messages.
        weights: by name; each sharded as in the module, or whole and the same on all ranks.
        may_lack: whether the source may lack the weight of a name, which then stays as it is.
        grows: whether a hook may still make modules and buffers.

    Raises:
        ConfigError: names or sizes differ from the module's. With strict=False only sizes are compared.
    """
    own = module.state_dict()
    elsewhere = _names_of_all_ranks(own) - own.keys()  # other stages of a pipeline have these
    chosen = {name: _placed_as(value, own.get(name)) for name, value in weights.items() if name not in elsewhere}
    late = {name: chosen.pop(name) for name in [*chosen] if is_of_none(name, module)}
    lacking = load_tensors_of(source, module, chosen, strict=strict, may_lack=may_lack, grows=grows)
    return late | {name: chosen[name] for name in lacking}


def place_late_weights(source: Path, module: nn.Module, weights: dict[str, Any], *, strict: bool = True) -> None:
    """Load what `place_weights` returned, once the modules are there. With strict, raise ConfigError if one is not."""
    own = module.state_dict()
    if strict and (surplus := sorted(weights.keys() - own.keys())):
        raise ConfigError(misfit.another_model(source, [], surplus))
    placed = {name: _placed_as(value, own[name]) for name, value in weights.items() if name in own}
    load_tensors_of(source, module, placed, strict=False)


def is_of_none(name: str, module: nn.Module) -> bool:
    """Return whether a weight's name leads to an attribute that is None instead of a module."""
    found: Any = module
    for part in name.split(".")[:-1]:
        found = getattr(found, part, module)
        if not isinstance(found, nn.Module) or found is module:
            return found is None
    return False


def load_tensors_of(
    source: Path, module: nn.Module, weights: dict[str, Any], *, strict: bool = True, assign: bool = False,
    may_lack: Callable[[str], bool] | None = None, grows: bool = False,
) -> list[str]:  # fmt: skip
    """Call the module's `load_state_dict`, and name what does not fit. With `grows` return the names that it lacks."""
    try:
        missing, surplus = module.load_state_dict(weights, strict=False, assign=assign)
    except RuntimeError as error:  # sizes; torch compares them whether strict or not
        raise ConfigError(misfit.of_load_state_dict(source, error)) from None
    missing = [name for name in missing if may_lack is None or not may_lack(name)]
    late = [name for name in surplus if grows and name in weights]  # not what hooks of load_state_dict have renamed
    if strict and (missing or len(late) < len(surplus)):
        raise ConfigError(misfit.another_model(source, sorted(missing), sorted(surplus)))
    return late


def _placed_as(value: Any, target: Any) -> Any:
    if not isinstance(target, DTensor) or isinstance(value, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != target.shape:
        return value  # load_state_dict names it
    value = value.to(target.device, target.dtype)
    # src_data_rank=None: no communication, since every rank has the whole tensor
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def _weight_names(saved: dict[str, Any]) -> set[str]:
    return {name for name in saved if not name.startswith(RESERVED)}


def _names_of_all_ranks(own: Iterable[str]) -> set[str]:
    return {name for names in process_group.all_gather_object([*own]) for name in names}


# ---------------------------------------------------------------- loading the optimizers' state
def load_optimizers(
    checkpoint: Path, module: nn.Module, optimizers: list[Optimizer], *, groups: list[list[dict[str, Any]] | None],
    extra: dict[str, Tensor] | None = None,
) -> dict[Tensor, Tensor]:  # fmt: skip
    """Load the optimizers' state in place, and return the gradients that were saved with it, by parameter.

    Args:
        groups: each optimizer's parameter groups, as saved; one without them keeps its state.
        extra: further tensors to fill if the checkpoint has them, such as the averaged weights.
    """
    saved, names = storage.read_metadata(checkpoint).state_dict_metadata, parameter_names(module)
    state = {name: value for name, value in (extra or {}).items() if name in saved}
    restored = [(i, *pair) for i, pair in enumerate(zip(optimizers, groups, strict=False)) if pair[1] is not None]
    with_state = {name.rpartition(".")[0] for name in saved if name.startswith(f"{OPTIMIZER}.")}
    for index, optimizer, _ in restored:
        add_groups(optimizer, names, groups[index] or [])
        create_state(optimizer, held={p for p, name in names.items() if f"{OPTIMIZER}.{index}.{name}" in with_state})
        own = optimizer_state(optimizer, names, index=index)
        _check_optimizer(checkpoint, saved, own, index=index)
        state |= {name: value for name, value in own.items() if name in saved}
    gradients = {p: torch.zeros_like(p) for p, name in names.items() if restored and f"{GRADIENTS}{name}" in saved}
    state |= {f"{GRADIENTS}{names[param]}": gradient for param, gradient in gradients.items()}
    _check_sizes(checkpoint, saved, state)
    storage.read_tensors(checkpoint, state)
    for index, optimizer, of_optimizer in restored:
        for param in list(optimizer.state):
            prefix = f"{OPTIMIZER}.{index}.{names[param]}."
            if not any(name.startswith(prefix) for name in saved):  # it had no gradient yet
                del optimizer.state[param]
                continue
            for key, value in optimizer.state[param].items():
                if not isinstance(value, Tensor):
                    optimizer.state[param][key] = state[prefix + key]
        restore_groups(optimizer, group_names(optimizer, names), of_optimizer or [])
    return gradients


# ---------------------------------------------------------------- what is frozen
def flags(module: nn.Module) -> dict[str, bool]:
    """Return which weights are trained and which layers keep running statistics: what freezing a part changes."""
    trained = {f"{name}.requires_grad": param.requires_grad for name, param in module.named_parameters()}
    layers = {name: getattr(layer, "track_running_stats", None) for name, layer in module.named_modules()}
    return trained | {f"{name}.track_running_stats": kept for name, kept in layers.items() if isinstance(kept, bool)}


def set_flags(module: nn.Module, changed: Mapping[str, bool]) -> None:
    """Set flags by their names in `flags`, as far as the module has them."""
    owners: dict[str, Any] = dict(module.named_modules()) | dict(module.named_parameters())
    for name, value in changed.items():
        owner, _, flag = name.rpartition(".")
        if owner in owners:
            setattr(owners[owner], flag, value)


# ---------------------------------------------------------------- reading checkpoints
def holds(checkpoint: Path | None) -> Callable[[str], bool]:
    """Return whether a checkpoint holds the weight of a name. A file of Lightning's, which may rename them, has all."""
    if checkpoint is None or directory.is_file(checkpoint):
        return lambda name: checkpoint is not None
    return _weight_names(storage.read_metadata(checkpoint).state_dict_metadata).__contains__


def is_weights_only(checkpoint: Path) -> bool:
    """Return whether a checkpoint is no point of a run to resume, but only weights to start one with."""
    return directory.is_file(checkpoint) or "loops" not in storage.read_meta(checkpoint)


def read_whole(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint as Lightning's `on_load_checkpoint` expects it, with unsharded weights on the CPU."""
    meta = plain.restored(storage.read_meta(checkpoint))
    meta.pop(of_ranks.KEY, None)
    return meta | {"state_dict": load_full_state_dict(checkpoint) | meta.get(OTHER, {})}


def load_full_state_dict(checkpoint: Path | str, *, prefix: str = "") -> dict[str, Tensor]:
    """Return the unsharded weights on the CPU, in one process without a process group.

    Args:
        prefix: "" for the weights, "extra.ema." for the averaged ones; it is removed from the names.
    """
    checkpoint = resume.to_path(checkpoint)
    saved = storage.read_metadata(checkpoint).state_dict_metadata
    wanted = [n for n in saved if (n.startswith(prefix) if prefix else not n.startswith(RESERVED))]
    return {name.removeprefix(prefix): value for name, value in load_tensors(checkpoint, wanted, saved).items()}


def load_tensors(checkpoint: Path, names: Iterable[str], saved: dict[str, Any]) -> dict[str, Any]:
    """Return unsharded tensors and plain values of a checkpoint, read by this process alone."""
    state: dict[str, Any] = {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
        if isinstance(saved[name], TensorStorageMetadata)
        else None
        for name in names
    }
    storage.read_tensors(checkpoint, state, alone=True)
    return state


# ---------------------------------------------------------------- mismatches, reported by name
def check_names(checkpoint: Path, saved: dict[str, Any], names: list[str], *, may_lack: Set[str]) -> None:
    """Raise ConfigError if a checkpoint does not hold the weights of all ranks' `names`, but for `may_lack`."""
    missing = sorted(set(names) - saved.keys() - may_lack)
    surplus = sorted(_weight_names(saved) - _names_of_all_ranks(names))
    if missing or surplus:
        raise ConfigError(misfit.another_model(checkpoint, missing, surplus))


def _size_of(entry: Any) -> tuple[int, ...] | None:
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def _check_sizes(checkpoint: Path, saved: dict[str, Any], state: dict[str, Any]) -> None:
    wrong = [
        f"{name} is {size} there and {tuple(value.shape)} here"
        for name, value in state.items()
        if isinstance(value, Tensor) and (size := _size_of(saved[name])) not in (None, tuple(value.shape))
    ]
    if wrong:
        raise ConfigError(misfit.other_sizes(checkpoint, wrong))


def _check_optimizer(checkpoint: Path, saved: dict[str, Any], own: dict[str, Any], *, index: int) -> None:
    def split(names: Iterable[str]) -> list[tuple[str, str]]:
        return [(parameter, key) for parameter, _, key in (name.rpartition(".") for name in names)]

    held, mine = split(name for name in saved if name.startswith(f"{OPTIMIZER}.{index}.")), split(own)
    common = {parameter for parameter, _ in held} & {parameter for parameter, _ in mine}
    there, here = (sorted({key for parameter, key in pairs if parameter in common}) for pairs in (held, mine))
    if there != here:
        raise ConfigError(
            f"{checkpoint} was saved with another optimizer: its state holds {misfit.few(there)}, "
            f"this one's {misfit.few(here)}. Resume with the optimizer that the run began with."
        )
