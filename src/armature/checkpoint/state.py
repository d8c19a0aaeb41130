"""Checkpoints that any layout writes and any other reads: a directory of torch.distributed.checkpoint.

    step=000120/
      .metadata  __0_0.distcp …   each rank's part of the weights and optimizer state, keyed by undivided names
      meta.pt                     the rest of Lightning's checkpoint: loops, callbacks, schedulers, data position, each
                                  rank's random state; tensors and plain types only
      manifest.json               names, sizes and checksums of the others, written last

Weights are keyed as in the undivided LightningModule ("model.blocks.0.…"), optimizer state as
"optimizer_states.<i>.<parameter name>.<key>", parameter groups in meta.pt as hyperparameters with parameter names.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from armature.checkpoint import storage
from armature.parallel import process_group

OPTIMIZER = "optimizer_states"
EXTRA = "extra"  # what callbacks keep beside the weights, such as their average: "extra.ema.model.blocks.0.…"
RESERVED = (f"{OPTIMIZER}.", f"{EXTRA}.")
# how a step is computed on this machine, not what it computes: never taken over from a checkpoint
RUNTIME_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


# ---------------------------------------------------------------- state, keyed by undivided names
def module_state(module: nn.Module, *, buffers: bool = True) -> dict[str, Tensor]:
    """Parameters and persistent buffers as they lie on this rank, without copies.

    Args:
        buffers: whether this rank speaks for the buffers, which may differ between ranks (running statistics).
    """
    named_buffers = {name for name, _ in module.named_buffers()}
    return {
        name: value.detach()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and (buffers or name not in named_buffers)
    }


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Each parameter's first name. Through the state dict, since that puts gathered weights back into shards first."""
    names: dict[Tensor, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(value, name)
    return names


def optimizer_state(optimizer: Optimizer, names: dict[Tensor, str], *, index: int) -> dict[str, Any]:
    """The state of each parameter under `optimizer_states.<index>.<name>.<key>`, without copies."""
    return {
        f"{OPTIMIZER}.{index}.{names[param]}.{key}": value
        for param, state in optimizer.state.items()
        for key, value in state.items()
    }


def group_names(optimizer: Optimizer, names: dict[Tensor, str]) -> list[list[str]]:
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def param_groups(optimizer: Optimizer, names: list[list[str]]) -> list[dict[str, Any]]:
    """Each group's hyperparameters and the names of its parameters."""
    return [
        {"names": of_group} | {k: v for k, v in group.items() if k != "params" and k not in RUNTIME_OPTIONS}
        for group, of_group in zip(optimizer.param_groups, names, strict=True)
    ]


def merge_groups(groups_of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The undivided model's groups from those of pipeline stages: equal hyperparameters are one group."""
    merged: list[dict[str, Any]] = []
    for group in (group for groups in groups_of_ranks for group in groups):
        hyper = {k: v for k, v in group.items() if k != "names"}
        for known in merged:
            if {k: v for k, v in known.items() if k != "names"} == hyper:
                known["names"] += [name for name in group["names"] if name not in known["names"]]
                break
        else:
            merged.append({"names": list(group["names"]), **hyper})
    return merged


def restore_groups(optimizer: Optimizer, names: list[list[str]], saved: list[dict[str, Any]]) -> None:
    """Hyperparameters by parameter name, so that neither the order of groups nor that of parameters matters."""
    by_name = {name: group for group in saved for name in group["names"]}
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        known = next((by_name[name] for name in of_group if name in by_name), {})
        group.update({k: v for k, v in known.items() if k in group and k != "names"})


def create_state(optimizer: Optimizer) -> None:
    """Make the state tensors of an optimizer that has not stepped yet, so that there is something to load into.

    A step with zero gradients and learning rate zero: the optimizer itself knows shapes, types and placements best.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------- directories
def save(
    directory: Path, tensors: dict[str, Any], meta: dict[str, Any], *, facts: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint aside as `<directory>.part`, and rename it when every rank's part is complete.

    Called by all ranks. An error of one rank is raised on all of them, and leaves what was there before.

    Args:
        tensors: this rank's part of weights and optimizer state.
        meta: Lightning's remaining checkpoint; rank 0's is written.
        facts: what the manifest says beside files and world size.
    """
    part = storage.prepare(directory, meta)
    with storage.single_process_is_meant():
        try:
            dcp.save(tensors, storage_writer=storage.writer(part), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise storage.failure(error) from error
    storage.complete(part, directory, facts or {})


def load(
    directory: Path, module: nn.Module, optimizers: list[Optimizer], *, extra: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """Load weights, and the state of optimizers, in place; give back what meta.pt holds.

    Args:
        extra: further tensors to fill where the checkpoint has them, such as the averaged weights.

    Raises:
        ValueError: where names, sizes or the optimizer's kind differ, naming them.
    """
    saved = storage.read_metadata(directory).state_dict_metadata
    names = parameter_names(module)
    meta = storage.read_meta(directory)
    state: dict[str, Any] = dict(module_state(module))
    check_names(directory, saved, list(state))
    state |= {name: value for name, value in (extra or {}).items() if name in saved}
    for index, optimizer in enumerate(optimizers):
        create_state(optimizer)
        own = optimizer_state(optimizer, names, index=index)
        _check_optimizer(directory, saved, own, index=index)
        state |= {name: value for name, value in own.items() if name in saved}
    _check_sizes(directory, saved, state)
    storage.read_tensors(directory, state)
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


def is_weights_only(directory: Path) -> bool:
    """Whether a checkpoint is no point of a run, but weights to begin one with."""
    return "loops" not in storage.read_meta(directory)


def load_full_state_dict(directory: Path | str, *, prefix: str = "") -> dict[str, Tensor]:
    """The undivided weights on CPU, in one process without a process group.

    Args:
        prefix: "" for the weights, "extra.ema." for the averaged ones; it is taken off the names.
    """
    directory = Path(directory)
    saved = storage.read_metadata(directory).state_dict_metadata
    wanted = [n for n in saved if (n.startswith(prefix) if prefix else not n.startswith(RESERVED))]
    return {name.removeprefix(prefix): value for name, value in load_tensors(directory, wanted, saved).items()}


def load_tensors(directory: Path, names: Iterable[str], saved: dict[str, Any]) -> dict[str, Any]:
    """Undivided tensors, or plain values, of a checkpoint, read by this process alone."""
    state: dict[str, Any] = {
        name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
        if isinstance(saved[name], TensorStorageMetadata)
        else None
        for name in names
    }
    storage.read_tensors(directory, state, alone=True)
    return state


# ---------------------------------------------------------------- what does not fit, said by name
def check_names(directory: Path, saved: dict[str, Any], names: list[str]) -> None:
    """Raises ValueError where a checkpoint does not hold exactly the weights of all ranks' `names`."""
    missing = sorted(set(names) - saved.keys())
    held = {name for of_rank in process_group.all_gather_object(names) for name in of_rank}
    surplus = sorted(name for name in saved if not name.startswith(RESERVED) and name not in held)
    if missing or surplus:
        raise ValueError(
            f"{directory} holds another model's weights. "
            f"Not in the checkpoint: {_few(missing)}. Not in the model: {_few(surplus)}."
        )


def _check_sizes(directory: Path, saved: dict[str, Any], state: dict[str, Any]) -> None:
    wrong = [
        f"{name} is {tuple(saved[name].size)} there and {tuple(value.shape)} here"
        for name, value in state.items()
        if isinstance(value, Tensor)
        and isinstance(saved[name], TensorStorageMetadata)
        and tuple(saved[name].size) != tuple(value.shape)
    ]
    if wrong:
        raise ValueError(f"{directory} holds weights of other sizes: {_few(wrong)}.")


def _check_optimizer(directory: Path, saved: dict[str, Any], own: dict[str, Any], *, index: int) -> None:
    def kinds(names: Iterable[str]) -> set[str]:
        return {name.rpartition(".")[2] for name in names}

    prefix = f"{OPTIMIZER}.{index}."
    parameters = {name.rpartition(".")[0] for name in own}
    there = [name for name in saved if name.startswith(prefix) and name.rpartition(".")[0] in parameters]
    here = [name for name in own if any(name.rpartition(".")[0] == other.rpartition(".")[0] for other in there)]
    if kinds(there) != kinds(here):
        raise ValueError(
            f"{directory} was saved with another optimizer: its state holds {_few(sorted(kinds(there)))}, "
            f"this one's {_few(sorted(kinds(here)))}. Resume with the optimizer that the run began with."
        )


def _few(names: list[str], *, limit: int = 5) -> str:
    shown = ", ".join(names[:limit]) or "nothing"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
