"""The state of a model, keyed by unsharded names, so that any layout reads what any other wrote.

Weights are keyed as in the unsharded LightningModule ("model.blocks.0.…"), optimizer state as
".optimizer_states.<i>.<parameter name>.<key>" (checkpoint/optimizers.py), and tensors of callbacks
as ".extra.<callback>.<name>". No weight's name begins with a dot.
"""

# pyright: reportPrivateImportUsage=false
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from armature.checkpoint import directory, plain, resume, storage
from armature.errors import ConfigError, error_line
from armature.parallel import process_group, whole_weights

OPTIMIZER = "optimizer_states"  # in Lightning's checkpoint
RESERVED = directory.RESERVED  # torch refuses modules of an empty name
OPTIMIZER_TENSORS = f"{RESERVED}{OPTIMIZER}"
EXTRA = f"{RESERVED}extra"
GRADIENTS = f"{EXTRA}.grad."
# entries in meta.pt
RANDOM = f"{RESERVED}random"  # the random state of each rank
OTHER = f"{RESERVED}extra_state"  # what modules keep beside tensors, by name


def module_state(module: nn.Module, *, buffers: bool = True) -> dict[str, Any]:
    """Return this rank's part of the parameters and persistent buffers, without copies, and what
    modules keep beside tensors, through torch's `get_extra_state`.

    Args:
        buffers: include buffers (running statistics). They may differ between ranks: only one rank
            saves them.
    """
    left_out = () if buffers else dict(module.named_buffers())
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
        if name not in left_out
    }


def full_state_dict(module: L.LightningModule, *, prefix: str = "") -> dict[str, Any]:
    """Return what `module_state` returns in one process, on the CPU: on rank 0, and nothing on
    others.

    Called by all ranks.

    Args:
        prefix: of the names to take, which is removed from them.
    """
    own = module.trainer.strategy.lightning_module_state_dict()
    names = process_group.all_gather_object([name for name in own if name.startswith(prefix)])
    # the first rank of each
    holders = {name: rank for rank, held in reversed([*enumerate(names)]) for name in held}
    found: dict[str, Any] = {}
    # one after another: rank 0 gets room for as many as there are ranks
    for name, holder in holders.items():
        value = whole_weights.whole(own.get(name))
        if holder == process_group.rank() and isinstance(value, Tensor):
            value = value.detach().to("cpu", copy=True)
        if holder:
            everyones = process_group.gather_object(
                value if holder == process_group.rank() else None
            )
            value = everyones[holder] if everyones else None
        if process_group.rank() == 0:
            found[name.removeprefix(prefix)] = value
    return found


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Return each parameter's first name: that of the state dict, or the module's own if the state
    dict leaves it out.

    The state dict is asked first, since it reshards gathered weights.
    """
    names: dict[Tensor, str] = {}
    for name, value in [*state_of_parameters(module).items(), *module.named_parameters()]:
        if isinstance(value, nn.Parameter):
            names.setdefault(value, name)
    return names


def state_of_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the state dict with the parameters themselves: torch's if the module's own takes no
    arguments.
    """
    if _takes(module.state_dict, "keep_vars"):
        return module.state_dict(keep_vars=True)
    return nn.Module.state_dict(module, keep_vars=True)


def _takes(method: Callable[..., Any], argument: str) -> bool:
    given = inspect.signature(method).parameters
    return argument in given or any(each.kind is each.VAR_KEYWORD for each in given.values())


def pending_gradients(module: nn.Module) -> dict[str, Any]:
    """Return gradients as `.extra.grad.<name>`, for a module whose steps may use those of earlier
    batches too; a sparse one as bytes, since torch's writer takes no sparse tensors.
    """
    return {
        f"{GRADIENTS}{name}": grad if grad.layout == torch.strided else storage.dumped(grad)
        for param, name in parameter_names(module).items()
        if (grad := param.grad) is not None
    }


# ---------------------------------------------------------------- loading weights
def read_weights(checkpoint: Path, module: nn.Module, *, in_place: bool = False) -> dict[str, Any]:
    """Return a checkpoint's weights, as far as this rank needs them.

    Called by all ranks.

    A tensor of the module's name and size is sharded as in the module; one that no rank knows is
    whole, on the CPU.

    Args:
        in_place: read into the tensors of the module's state dict instead of new ones.
    """
    saved: dict[str, Any] = storage.read_metadata(checkpoint).state_dict_metadata
    own = module_state(module)
    unknown = _weight_names(saved) - _names_of_all_ranks(own)
    weights: dict[str, Any] = {}
    for name in (unknown | own.keys()) & saved.keys():
        facts = saved[name]
        if name in own and getattr(facts, "size", None) == own[name].shape:
            weights[name] = own[name] if in_place else torch.empty_like(own[name])
        else:
            weights[name] = torch.empty(facts.size, dtype=facts.properties.dtype)
    storage.read_tensors(checkpoint, weights)
    return weights | plain.restored(storage.read_meta(checkpoint).get(OTHER, {}))


def place_weights(
    source: Path,
    module: nn.Module,
    weights: dict[str, Any],
    **options: Any,
) -> None:
    """Load weights through the module's `load_state_dict`, and so with hooks and code of users.

    Called by all ranks; `weights` are sharded as in the module, or whole and the same on all ranks.
    Other arguments and errors are those of `load_tensors_of`.
    """
    own = module.state_dict()
    elsewhere = _names_of_all_ranks(own) - own.keys()  # other stages of a pipeline have these
    chosen = {
        name: whole_weights.sharded_like(own.get(name), value)
        for name, value in weights.items()
        if name not in elsewhere
    }
    load_tensors_of(source, module, chosen, **options)


def load_tensors_of(
    source: Path,
    module: nn.Module,
    weights: dict[str, Any],
    *,
    strict: bool = True,
    assign: bool = False,
    may_lack: Callable[[str], bool] = lambda name: False,
) -> None:
    """Call the module's `load_state_dict`, and name what does not fit.

    One that the module replaces decides itself what may lack. It may take no `assign`, as torch's
    did once, and may return nothing.

    Args:
        source: where the weights come from, for messages.
        may_lack: whether the source may lack the weight of a name, which then stays as it is.

    Raises:
        ConfigError: names or sizes differ from the module's. With strict=False only sizes are
            compared.
    """
    decides = type(module).load_state_dict is not nn.Module.load_state_dict
    options: dict[str, Any] = {"strict": strict and decides}
    if assign and _takes(module.load_state_dict, "assign"):
        options["assign"] = True
    try:
        missing, surplus = module.load_state_dict(weights, **options) or ([], [])
    except RuntimeError as error:  # sizes; torch compares them whether strict or not
        raise ConfigError(
            f"{source} does not fit the model: {error_line(error)} Give it the sizes that it was "
            "trained with."
        ) from None
    if strict and not decides:
        _check_names(source, [name for name in missing if not may_lack(name)], surplus)


def check_names(
    checkpoint: Path, saved: Iterable[str], own: Sequence[str], *, may_lack: Iterable[str]
) -> None:
    """Raise ConfigError if a checkpoint does not hold the weights of all ranks' `own` names, but
    for `may_lack`.
    """
    lacking = {*own}.difference(saved, may_lack)
    _check_names(checkpoint, lacking, _weight_names(saved) - _names_of_all_ranks(own))


def _check_names(source: Path, missing: Iterable[str], surplus: Iterable[str]) -> None:
    if missing or surplus:
        raise ConfigError(
            f"{source} holds another model's weights. Not in the checkpoint: "
            f"{_few(sorted(missing))}. Not in the model: {_few(sorted(surplus))}."
        )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) or "nothing"
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _weight_names(saved: Iterable[str]) -> set[str]:
    return {name for name in saved if not name.startswith(RESERVED)}


def _names_of_all_ranks(own: Iterable[str]) -> set[str]:
    return {name for names in process_group.all_gather_object([*own]) for name in names}


# ---------------------------------------------------------------- buffers that change their size
def resize_buffers(checkpoint: Path, module: L.LightningModule) -> None:
    """Give buffers the sizes that they had when the checkpoint was saved: training may change
    them.
    """
    saved = storage.read_metadata(checkpoint).state_dict_metadata
    for path, part in module.named_modules():
        for key, value in part._buffers.items():
            facts = saved.get(f"{path}.{key}".removeprefix("."))
            if not isinstance(facts, TensorStorageMetadata):
                continue
            if value is None:
                value = torch.empty(0, dtype=facts.properties.dtype, device=module.device)
            if value.shape != facts.size:
                part._buffers[key] = value.new_empty(facts.size)


# ---------------------------------------------------------------- reading checkpoints
def holds(checkpoint: Path | None) -> Callable[[str], bool]:
    """Return whether a checkpoint holds the weight of a name. Called by all ranks.

    A file of Lightning's, which may rename them, has all.
    """
    if checkpoint is None or directory.is_file(checkpoint):
        return lambda name: checkpoint is not None
    storage.keep_metadata(checkpoint)  # the resume reads it again
    return _weight_names(storage.read_metadata(checkpoint).state_dict_metadata).__contains__


def is_weights_only(checkpoint: Path) -> bool:
    """Return whether a checkpoint is no point of a run to resume, but only weights to start one
    with.
    """
    return directory.is_file(checkpoint) or "loops" not in storage.read_meta(checkpoint)


def read_whole(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint as Lightning's `on_load_checkpoint` expects it, with unsharded weights on
    the CPU.
    """
    meta = plain.restored(storage.read_meta(checkpoint))
    return meta | {"state_dict": load_full_state_dict(checkpoint) | meta.get(OTHER, {})}


def load_full_state_dict(checkpoint: Path | str, *, prefix: str = "") -> dict[str, Tensor]:
    """Return the unsharded weights on the CPU, in one process without a process group.

    Args:
        prefix: "" for the weights, ".extra.ema." for the averaged ones; it is removed from the
            names.
    """
    checkpoint = resume.to_path(checkpoint)
    saved = storage.read_metadata(checkpoint).state_dict_metadata
    wanted = [n for n in saved if (n.startswith(prefix) if prefix else not n.startswith(RESERVED))]
    loaded = load_tensors(checkpoint, wanted, saved)
    return {name.removeprefix(prefix): value for name, value in loaded.items()}


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
