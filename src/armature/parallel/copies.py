"""Copies of sharded weights: a teacher that `on_fit_start` makes, a snapshot at the end of an
epoch, a file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from armature.errors import ConfigError, place_of_call

SHARDING = ("torch.distributed.fsdp", "armature.parallel")  # modules whose hooks belong to sharding
# torch's dicts of hooks
HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))
STATE_PREFIX = "__composable_api"  # of the attributes in which torch keeps what sharding needs


def allow(model: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    """Let `copy.deepcopy` copy a model that is sharded as one unit; torch refuses it.

    All ranks must copy. The copy is gathered for a moment, and then sharded in the same way.

    Args:
        shard: shards the copy.
    """

    def deepcopy(original: nn.Module, memo: dict[int, Any]) -> nn.Module:
        if "_armature_shard" not in vars(original):  # another model of the same class
            raise AssertionError("FSDP does not support deepcopy of a model in several units.")
        copied = _unsharded_copy(original, memo)
        vars(original)["_armature_shard"](copied)
        return copied

    model.__dict__["_armature_shard"] = shard
    kind: Any = type(model)  # FSDP's, made for models of this class
    kind.__deepcopy__ = deepcopy


def _unsharded_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy with whole weights, that knows nothing of sharding.

    Args:
        memo: copies by id, as `copy.deepcopy` hands it on.
    """
    assert isinstance(model, FSDPModule)
    for unit in model.modules():  # weights that are not rounded have units of their own
        if isinstance(unit, FSDPModule):
            unit.reshard()
    for param in model.parameters():
        whole = param.detach().full_tensor().clone()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        memo[id(param)] = nn.Parameter(whole, requires_grad=param.requires_grad)
    kept = {key: value for key, value in model.__dict__.items() if not key.startswith(STATE_PREFIX)}
    hooks = {id(hook): hook for hooks in _hooks(model) for hook in hooks.values() if _shards(hook)}
    memo |= hooks | {id(model.__dict__["_armature_shard"]): None}
    original: Any = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    copied = original.__new__(original)
    memo[id(model)] = copied
    copied.__dict__.update(copy.deepcopy(kept, memo))
    for found in _hooks(copied):
        for key in [key for key, hook in found.items() if id(hook) in hooks]:
            del found[key]
    return copied


def _hooks(model: nn.Module) -> Iterator[dict[int, Any]]:
    """Yield torch's dicts of hooks of a model and its submodules."""
    for module in model.modules():
        yield from (vars(module)[name] for name in HOOKS if name in vars(module))


def _shards(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith(SHARDING)


def refuse_pickles() -> None:
    """Let torch.save and pickle refuse a sharded tensor, of which torch would write this rank's
    part without a word.
    """
    DTensor.__reduce_ex__ = _refuse  # pyright: ignore[reportAttributeAccessIssue]


def refuse_pickled_states(module: nn.Module, *, gathers: bool = False) -> None:
    """Let torch.save and pickle refuse state dicts of a module and its parts, of which each rank
    has plain tensors.

    A stage of a pipeline has the weights of its blocks, and ZeRO-3 leaves weights empty between
    steps. A part without weights, such as a metric, is whole.

    Args:
        gathers: weights are whole at times, as within ZeRO-3's GatheredParameters; then nothing is
            refused.
    """
    for part in module.modules():
        if next(part.parameters(), None) is not None:
            part.register_state_dict_post_hook(_mark_unless_whole if gathers else _mark)


def _mark_unless_whole(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
) -> None:
    if any(
        param.numel() != getattr(param, "ds_numel", param.numel()) for param in module.parameters()
    ):
        _mark(module, state_dict, prefix, local_metadata)


def _mark(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    local_metadata["of_one_rank"] = _OfOneRank()  # torch keeps it as an attribute of the state dict


class _OfOneRank:
    def __deepcopy__(self, memo: Any) -> _OfOneRank:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self, protocol)


def _refuse(part: DTensor | _OfOneRank, protocol: Any) -> NoReturn:
    what = (
        f"a tensor of size {tuple(part.shape)}" if isinstance(part, DTensor) else "this state dict"
    )
    raise ConfigError(
        f"{place_of_call() or 'torch.save'}: {what} is sharded over ranks, and a file or pickle "
        "would hold this rank's "
        "part of it. On all ranks, type weights = armature.full_state_dict(self), with "
        'prefix="net." for the weights of self.net, and save these on rank 0; or '
        'trainer.save_checkpoint("x.ckpt"). '
        "The run's own checkpoints hold everything: armature.load and scripts/convert.py read "
        "them. Or type "
        "strategy=ddp."
    )
