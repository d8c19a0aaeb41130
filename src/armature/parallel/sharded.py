"""What torch does to sharded weights wrongly and in silence: here it is right, or an error that
names `armature.whole_weights`.

These are the only changes of DTensor for the whole process.
"""

# pyright: reportPrivateImportUsage=false

import copyreg
import fnmatch
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from armature.errors import ConfigError, place_of_call
from armature.parallel import units
from armature.parallel.gradients import local_part
from armature.parallel.whole_weights import sharded_like, whole

MIXED = "mixed torch.Tensor and DTensor"  # in torch's error for an operation of both


def guard() -> None:
    """Change what DTensor does in silence.

    `p.data = x` would change nothing. `float(p.norm())` would read this rank's part, and a penalty
    such as `p.square().sum()` could not be added to a loss. `p.normal_()` would fill all parts with
    the same numbers on CPUs, and on GPUs with others than in one process. A plain tensor of one
    element beside a sharded one would count as the same on all ranks. `torch.save` would write this
    rank's part. `clip_grad_norm_` would refuse a list of sharded and whole weights.
    """
    DTensor.data = property(_data, _assign)  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("norm", "sum", "mean"):
        setattr(DTensor, name, _plain_number(getattr(Tensor, name)))
    for name in fnmatch.filter(dir(Tensor), "[a-z]*_"):  # what changes a tensor in place
        setattr(DTensor, name, _writing(getattr(Tensor, name)))
    DTensor.__setitem__ = _set_items  # pyright: ignore[reportAttributeAccessIssue]
    copyreg.pickle(DTensor, _refuse)
    dispatcher = DTensor._op_dispatcher
    handlers, aten = dispatcher._custom_op_handlers, torch.ops.aten
    handlers[aten._local_scalar_dense.default] = lambda op, args, kwargs: whole(args[0]).item()
    # Lightning's BaseFinetuning compares sharded and whole weights
    handlers[aten.equal.default] = lambda op, pair, kwargs: (
        pair[0].shape == pair[1].shape and op(*map(whole, pair))
    )
    handlers[aten._foreach_norm.Scalar] = lambda op, args, kwargs: [
        whole(torch.linalg.vector_norm(each, *args[1:], **kwargs)) for each in args[0]
    ]
    handlers[aten._foreach_mul_.Tensor] = lambda op, args, kwargs: op(
        [*map(local_part, args[0])], whole(args[1])
    )
    for draw in (aten.normal_, aten.uniform_, aten.randn_like, aten.rand_like):
        handlers[draw.default] = _draw
    handlers[aten.bernoulli_.float] = _draw
    dispatcher._try_replicate_spec_for_scalar_tensor = _replicate  # pyright: ignore[reportAttributeAccessIssue]


def _data(target: DTensor) -> Tensor:
    found = Tensor.data.__get__(target)  # pyright: ignore[reportAttributeAccessIssue]
    vars(target).setdefault("views", WeakSet()).add(found)
    return found


@torch.no_grad()
def _assign(target: DTensor, value: Tensor) -> None:
    same = (
        isinstance(value, DTensor) and value.shape == target.shape and value.dtype == target.dtype
    )
    if not same:
        raise ConfigError(
            f"param.data = …: the weight of {tuple(target.shape)}, {target.dtype}, is sharded over "
            f"ranks, and the value is a {type(value).__name__} of {tuple(value.shape)}, "
            f"{value.dtype}. Assign it within `with armature.whole_weights(self):`."
        )
    for view in vars(target).pop("views", ()):  # `old = p.data; p.data = x` leaves old as it is
        local_part(view).data = local_part(view).clone()
    target.copy_(value)  # in place: FSDP's own flat shard shares this memory


def _writing(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a method that writes into a tensor, but not into a view that DTensor has made a copy,
    as it does of a weight's rows.
    """

    def write(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self._base
        if base is not None and _memory(base) != _memory(self):
            raise RuntimeError(
                f"A part of size {tuple(self.shape)} of a weight or gradient that is sharded over "
                "ranks is a copy: what is written into it would be lost. Type weight[…] = value, "
                "or write within `with armature.whole_weights(self):`."
            )
        return method(self, *args, **kwargs)

    return write


def _memory(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage()._cdata


def _set_items(target: DTensor, key: Any, value: Any) -> None:
    """Write into the whole tensor, and keep this rank's part."""
    if target.requires_grad and torch.is_grad_enabled():
        Tensor.__setitem__(target, key, value)
        return
    full = whole(target)
    full[apply_to_collection(key, DTensor, whole)] = whole(value)
    target.copy_(sharded_like(target, full))


def _plain_number(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a method whose numbers are ordinary ones, with a gradient: a penalty is added to a
    loss, and Lightning's grad_norm makes a tensor of them.
    """

    def number(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        # torch would add up norms of parts
        summed = whole(self) if any(p.is_partial() for p in self.placements) else self
        found = method(summed, *args, **kwargs)
        return found if found.ndim else whole(found)

    return number


def _draw(op: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """Draw the whole tensor, as one process does, and keep this rank's part."""
    target, *others = args
    full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    part = sharded_like(target, op(full, *others, **kwargs))
    return part if "_like" in str(op) else target.copy_(part)


_torchs = DTensor._op_dispatcher._try_replicate_spec_for_scalar_tensor


def _replicate(op: Any, tensor: Tensor, mesh: DeviceMesh) -> Any:
    """Let a plain number stand beside sharded weights where no gradient is computed, as in an
    average: there it is the same on all ranks.
    """
    if units.crosses_data(mesh) and (tensor.ndim or torch.is_grad_enabled()):
        raise RuntimeError(f"{op}: got {MIXED}.")
    return _torchs(op, tensor, mesh)


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
            part.register_state_dict_post_hook(partial(_mark, gathers))


def _mark(
    gathers: bool, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]
) -> None:
    if not gathers or any(
        param.numel() != getattr(param, "ds_numel", param.numel()) for param in module.parameters()
    ):
        local_metadata["of_one_rank"] = _OfOneRank()  # torch keeps it in the state dict


def _refuse(part: object, protocol: Any = None) -> NoReturn:
    what = (
        f"a tensor of size {tuple(part.shape)}" if isinstance(part, DTensor) else "this state dict"
    )
    raise ConfigError(
        f"{place_of_call() or 'torch.save'}: {what} is sharded over ranks, and a file or pickle "
        "would hold this rank's part of it. On all ranks, type weights = "
        'armature.full_state_dict(self), with prefix="net." for the weights of self.net, and save '
        "these on rank 0; or write the file on rank 0 within `with armature.whole_weights(self):`; "
        'or trainer.save_checkpoint("x.ckpt"). The run\'s own checkpoints hold everything: '
        "armature.load and scripts/convert.py read them."
    )


class _OfOneRank:
    def __deepcopy__(self, memo: Any) -> "_OfOneRank":
        return self

    __reduce_ex__ = _refuse
