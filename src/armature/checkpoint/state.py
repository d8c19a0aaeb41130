"""The state of a model and its optimizers, keyed by unsharded names, so that any layout reads what any other wrote.

Weights are keyed as in the unsharded LightningModule ("model.blocks.0.…"), optimizer state as
"optimizer_states.<i>.<parameter name>.<key>", and tensors of callbacks as "extra.<callback>.<name>". Parameter groups
are in meta.pt, as hyperparameters with parameter names.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from armature.checkpoint import storage
from armature.parallel import process_group

OPTIMIZER = "optimizer_states"
EXTRA = "extra"
RESERVED = (f"{OPTIMIZER}.", f"{EXTRA}.")
# they select how a step is computed on this machine, not its result, so they are never read from a checkpoint
RUNTIME_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


def module_state(module: nn.Module, *, buffers: bool = True) -> dict[str, Tensor]:
    """Return this rank's part of the parameters and persistent buffers, without copies.

    Buffers (running statistics) may differ between ranks: only one rank saves them.
    """
    named_buffers = dict(module.named_buffers())
    return {
        name: value.detach()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and (buffers or name not in named_buffers)
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


def group_names(optimizer: Optimizer, names: dict[Tensor, str]) -> list[list[str]]:
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def param_groups(optimizer: Optimizer, names: list[list[str]]) -> list[dict[str, Any]]:
    """Return each group's hyperparameters and the names of its parameters."""
    return [
        {"names": of_group} | {k: v for k, v in group.items() if k != "params" and k not in RUNTIME_OPTIONS}
        for group, of_group in zip(optimizer.param_groups, names, strict=True)
    ]


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


def create_state(optimizer: Optimizer) -> None:
    """Create the state tensors of an optimizer that has not stepped yet, to load into."""
    if optimizer.state:
        return
    # by a step with zero gradients and learning rate zero: only the optimizer knows shapes, types and placements
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- reading checkpoints
def load(
    checkpoint: Path, module: nn.Module, optimizers: list[Optimizer], *, extra: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """Load weights and the state of optimizers in place, and return what meta.pt holds.

    Args:
        extra: further tensors to fill if the checkpoint has them, such as the averaged weights.
    """
    saved, meta = storage.read_metadata(checkpoint).state_dict_metadata, storage.read_meta(checkpoint)
    names = parameter_names(module)
    state: dict[str, Any] = dict(module_state(module))
    check_names(checkpoint, saved, list(state))
    state |= {name: value for name, value in (extra or {}).items() if name in saved}
    for index, optimizer in enumerate(optimizers):
        create_state(optimizer)
        own = optimizer_state(optimizer, names, index=index)
        _check_optimizer(checkpoint, saved, own, index=index)
        state |= {name: value for name, value in own.items() if name in saved}
    _check_sizes(checkpoint, saved, state)
    storage.read_tensors(checkpoint, state)
    for index, optimizer in enumerate(optimizers):
        for param in list(optimizer.state):
            prefix = f"{OPTIMIZER}.{index}.{names[param]}."
            if not any(name.startswith(prefix) for name in saved):  # it had no gradient yet
                del optimizer.state[param]
                continue
            for key, value in optimizer.state[param].items():
                if not isinstance(value, Tensor):
                    optimizer.state[param][key] = state[prefix + key]
        restore_groups(optimizer, group_names(optimizer, names), meta["param_groups"][index])
    return meta


def is_weights_only(checkpoint: Path) -> bool:
    """Return whether a checkpoint is no point of a run to resume, but only weights to start one with."""
    return "loops" not in storage.read_meta(checkpoint)


def load_full_state_dict(checkpoint: Path | str, *, prefix: str = "") -> dict[str, Tensor]:
    """Return the unsharded weights on the CPU, in one process without a process group.

    Args:
        prefix: "" for the weights, "extra.ema." for the averaged ones; it is removed from the names.
    """
    checkpoint = Path(checkpoint)
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
def check_names(checkpoint: Path, saved: dict[str, Any], names: list[str]) -> None:
    """Raise ValueError if a checkpoint does not hold exactly the weights of all ranks' `names`."""
    missing = sorted(set(names) - saved.keys())
    held = {name for of_rank in process_group.all_gather_object(names) for name in of_rank}
    surplus = sorted(name for name in saved if not name.startswith(RESERVED) and name not in held)
    if missing or surplus:
        raise ValueError(
            f"{checkpoint} holds another model's weights. "
            f"Not in the checkpoint: {_few(missing)}. Not in the model: {_few(surplus)}."
        )


def _check_sizes(checkpoint: Path, saved: dict[str, Any], state: dict[str, Any]) -> None:
    wrong = [
        f"{name} is {tuple(saved[name].size)} there and {tuple(value.shape)} here"
        for name, value in state.items()
        if isinstance(value, Tensor)
        and isinstance(saved[name], TensorStorageMetadata)
        and tuple(saved[name].size) != tuple(value.shape)
    ]
    if wrong:
        raise ValueError(f"{checkpoint} holds weights of other sizes: {_few(wrong)}.")


def _check_optimizer(checkpoint: Path, saved: dict[str, Any], own: dict[str, Any], *, index: int) -> None:
    def split(names: Iterable[str]) -> list[tuple[str, str]]:
        return [(parameter, key) for parameter, _, key in (name.rpartition(".") for name in names)]

    held, mine = split(name for name in saved if name.startswith(f"{OPTIMIZER}.{index}.")), split(own)
    common = {parameter for parameter, _ in held} & {parameter for parameter, _ in mine}
    there, here = (sorted({key for parameter, key in pairs if parameter in common}) for pairs in (held, mine))
    if there != here:
        raise ValueError(
            f"{checkpoint} was saved with another optimizer: its state holds {_few(there)}, "
            f"this one's {_few(here)}. Resume with the optimizer that the run began with."
        )


def _few(names: list[str], *, limit: int = 5) -> str:
    shown = ", ".join(names[:limit]) or "nothing"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
