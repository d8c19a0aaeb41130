"""What user code does with sharded weights and gradients, and torch does wrongly, in silence, or
not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from armature.errors import ConfigError

_MOST_BYTES = (
    1 << 26
)  # of gathered weights that parts kept for `check_parts` hold; the newest part is always kept
_watches_parts = False
WATCHED_FORWARDS = 6  # of a model, for changes of its weights
# in torch's error for an operation of a sharded weight and a plain tensor
MIXED = "mixed torch.Tensor and DTensor"


def support_user_code(*, watch_parts: bool = False) -> None:
    """Let `weight.data = …` and `weight[…] = …` change a sharded weight, and `norm()` return an
    ordinary number.

    With `watch_parts`, `check_parts` finds changes of rows in place. Activations must not be
    DTensors then.

    torch's own assignments leave the shard as it is, without an error: a momentum teacher would
    never move, and rows would never be set, since torch gathers a tensor before it takes rows of
    it. Lightning's `grad_norm` puts norms into `torch.tensor([…])`, which cannot read DTensors.
    torch.optim.Rprop sets elements by masks, for which torch has no rule.
    """
    DTensor.data = property(Tensor.data.__get__, _assign)  # pyright: ignore[reportAttributeAccessIssue]
    global _watches_parts
    _watches_parts = watch_parts
    DTensor.norm = _norm
    DTensor.__setitem__ = _set_items
    DTensor.__getitem__ = _get_items
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        setattr(DTensor, name, _whole_reader(name))
    for name in (
        "chunk",
        "diagonal",
        "dsplit",
        "hsplit",
        "narrow",
        "select",
        "split",
        "tensor_split",
        "unbind",
        "vsplit",
    ):
        setattr(DTensor, name, _part_taker(name))


@torch.no_grad()
def _assign(target: DTensor, value: Tensor) -> None:
    same = (
        isinstance(value, DTensor) and value.shape == target.shape and value.dtype == target.dtype
    )
    if not same:
        raise TypeError(
            "param.data = …: the weight is sharded over ranks, as a DTensor of shape "
            f"{tuple(target.shape)} and type "
            f"{target.dtype}, and the value is a {type(value).__name__} of {tuple(value.shape)}, "
            f"{value.dtype}. "
            "Compute it from weights that are sharded alike, outside of the models' forward; or "
            "type strategy=ddp."
        )
    target.copy_(value)  # in place: FSDP's own flat shard shares this memory


def _norm(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
    norm = Tensor.norm(self, *args, **kwargs)
    return norm.full_tensor() if isinstance(norm, DTensor) and norm.ndim == 0 else norm


def _whole_reader(name: str) -> Callable[[DTensor], Any]:
    """Return a method that reads a value of all ranks; torch's own reads this rank's part of a sum,
    mean or maximum.
    """
    function = getattr(Tensor, name)

    def read(self: DTensor) -> Any:
        return function(self.full_tensor())  # which communicates only if ranks hold parts

    return read


def _set_items(self: DTensor, key: Any, value: Any) -> None:
    number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)
    masked = isinstance(key, DTensor) and key.dtype == torch.bool and key.shape == self.shape
    partial = any(p.is_partial() for p in self.placements)
    if number and masked and key.placements == self.placements and not partial:
        self.to_local()[key.to_local()] = value  # each rank has the mask of its own elements
    elif partial or _shards(self) == 0 or (self.requires_grad and torch.is_grad_enabled()):
        Tensor.__setitem__(self, key, value)
    else:
        with torch.no_grad():
            whole = self.full_tensor().clone()
            whole[pytree.tree_map_only(DTensor, DTensor.full_tensor, key)] = (
                value.full_tensor() if isinstance(value, DTensor) else value
            )
            replicated = DTensor.from_local(
                whole, self.device_mesh, [Replicate()] * self.device_mesh.ndim
            )
            self.copy_(replicated.redistribute(placements=self.placements))


_parts: list[
    tuple[DTensor, int, int]
] = []  # that were gathered to be read, with versions and bytes of the whole
_changed_parts = False  # whether one that is no longer kept was changed


def _get_items(self: DTensor, key: Any) -> Any:
    part = _taken(Tensor.__getitem__, self, key)
    keys = key if isinstance(key, tuple) else (key,)
    if all(
        isinstance(each, int | slice | None) or each is Ellipsis for each in keys
    ):  # a view in one process
        _watch(self, part)
    return part


def _part_taker(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def take(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        taken = _taken(function, self, *args, **kwargs)
        for part in taken if isinstance(taken, tuple | list) else (taken,):
            _watch(self, part)
        return taken

    return take


def _taken(function: Callable[..., Any], whole: DTensor, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_inference_mode_enabled() or whole.is_inference():
        return function(whole, *args, **kwargs)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
    ):  # in inference mode torch makes no view of a sharded weight
        return function(whole, *args, **kwargs)


def _watch(whole: DTensor, part: Any) -> None:
    learns = (
        torch.is_grad_enabled() and whole.requires_grad
    )  # a change of the part is an error of torch's then
    if (
        _watches_parts
        and not learns
        and isinstance(part, DTensor)
        and _shards(part) < _shards(whole)
    ):
        if part.is_inference():  # it has no version
            return
        _parts.append((part, part._version, whole.numel() * whole.element_size()))
        while len(_parts) > 1 and sum(size for *_, size in _parts) > _MOST_BYTES:
            _forget_part()


def _forget_part() -> None:
    global _changed_parts
    part, version, _ = _parts.pop(0)
    _changed_parts |= part._version != version


def _shards(tensor: DTensor) -> int:
    return sum(placement.is_shard() for placement in tensor.placements)


def check_parts() -> None:
    """Raise ConfigError if a part of a sharded weight or gradient was changed in place: it was a
    copy.
    """
    global _changed_parts
    while _parts:
        _forget_part()
    changed, _changed_parts = _changed_parts, False
    if changed:
        raise ConfigError(
            "Rows of a sharded weight or gradient were changed in place, as in weight[0].zero_(), "
            "but they were "
            "gathered copies: the change was lost. Write weight[0] = 0, which works, or type "
            "strategy=ddp."
        )


# ---------------------------------------------------------------- weights used outside of their
# model's forward
@contextmanager
def gathers(*, evaluates: bool = False, possible: bool = True) -> Iterator[None]:
    """Within this context, an operation of sharded weights and plain tensors gathers the weights.

    A model's forward has gathered weights, but a step or hook may use layers without it:
    `self.net[:3](x)`, a method other than forward, `F.linear(x, self.net.weight)`. All ranks must
    reach the operation, as they must reach a forward.

    torch refuses plain tensors beside sharded ones, but takes one of a single element for the same
    on all ranks, in silence. Here the arguments' types decide, never how many samples a rank has.

    Args:
        evaluates: no weights change here, so that no number can be a factor of an average or a
            gradient.
        possible: False: such an operation is torch's error, also for one element.
    """
    rule: Callable[..., Any] = partial(_gather_if_mixed, evaluates=evaluates, possible=possible)
    with _torch_function(classmethod(lambda cls, *args, **kwargs: rule(*args, **kwargs))):  # pyright: ignore[reportCallIssue]
        yield


def as_torch() -> AbstractContextManager[None]:
    """Within this context, torch's own rules hold: an optimizer's numbers are all ranks'."""
    return _torch_function(_TORCHS_OWN)


_TORCHS_OWN = vars(DTensor)["__torch_function__"]


@contextmanager
def _torch_function(function: Any) -> Iterator[None]:
    before = vars(DTensor)["__torch_function__"]  # contexts are entered within one another
    DTensor.__torch_function__ = function
    try:
        yield
    finally:
        DTensor.__torch_function__ = before


def with_whole_loss(output: Any) -> Any:
    """Return what training_step returns with its loss, if that was made of sharded weights alone,
    as one number.
    """
    if isinstance(output, dict) and isinstance(output.get("loss"), DTensor):
        return {**output, "loss": _gathered(output["loss"])}
    return _gathered(output) if isinstance(output, DTensor) else output


# what asks for, or sets, something of the weight itself
_OF_THE_LEAF = (
    "__get__",
    "__set__",
    "__delete__",
    "__deepcopy__",
    "__reduce_ex__",
    "backward",
    "detach",
    "grad",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
)


def _placed(tensor: DTensor) -> DTensor:
    placed = _Placed.apply(tensor) if tensor.is_leaf and tensor.requires_grad else tensor
    assert isinstance(placed, DTensor)
    return placed


class _Placed(torch.autograd.Function):
    """The weight itself; its gradient is sharded as it is: that of a sum is whole on each rank,
    which FSDP misreads.
    """

    @staticmethod
    @override
    def forward(ctx: Any, tensor: DTensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.placements = tensor.placements
        return tensor.view_as(tensor)  # pyright: ignore[reportReturnType]

    @staticmethod
    @override
    def backward(ctx: Any, grad: DTensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.redistribute(placements=ctx.placements)


def _gather_if_mixed(
    func: Callable[..., Any],
    types: Any,
    args: Any = (),
    kwargs: Any = None,
    *,
    evaluates: bool,
    possible: bool,
) -> Any:
    kwargs = kwargs or {}
    sharded, plain = _operands((args, kwargs))
    if func.__name__ in _OF_THE_LEAF or not any(map(_is_over_data, sharded)):
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
    changed, whole = _operands(args[:1] if _is_in_place(func.__name__) else kwargs.get("out"))
    if changed and not (plain and any(each.requires_grad for each in changed)):
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
    in_use = any(map(_is_in_use, sharded))
    numbers = not any(each.ndim or each.requires_grad for each in plain)
    if plain and (evaluates or in_use or whole or not numbers):  # else of an average or a gradient
        if changed or not possible:
            raise RuntimeError(f"{func.__name__}: got {MIXED}.")
        args, kwargs = pytree.tree_map_only(DTensor, _gathered, (args, kwargs))
        return func(*args, **kwargs)
    learns = torch.is_grad_enabled()
    placed = (args, kwargs)
    if learns and possible:
        placed = pytree.tree_map_only(DTensor, _placed, placed)
    try:
        result = torch._C._disabled_torch_function_impl(func, types, *placed)
    except RuntimeError as error:
        if MIXED not in str(error) or not possible:
            raise
        args, kwargs = pytree.tree_map_only(DTensor, _gathered, (args, kwargs))
        return func(*args, **kwargs)
    if in_use and not learns:
        for each in _operands(result)[0]:
            vars(each)[_IN_USE] = True
    return result


_IN_USE = "_armature_in_use"  # an attribute of what is computed from weights without gradients


def _operands(args: Any) -> tuple[list[DTensor], list[Tensor]]:
    """Return the sharded and the plain tensors of an operation."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    sharded = [each for each in tensors if isinstance(each, DTensor)]
    return sharded, [each for each in tensors if not isinstance(each, DTensor)]


def _is_in_use(tensor: DTensor) -> bool:
    """Return whether a tensor is a weight or computed from one.

    Not a gradient, nor what is detached, such as an average.
    """
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad or _IN_USE in vars(tensor)


def _is_over_data(tensor: DTensor) -> bool:
    """Return whether ranks with different samples hold the tensor together.

    The ranks of a tensor axis have the same samples, and so the same numbers.
    """
    return not {*(tensor.device_mesh.mesh_dim_names or ("data",))} <= {"tensor", "expert"}


def _is_in_place(name: str) -> bool:
    """Return whether an operation changes its first tensor."""
    if name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    return name.endswith("_")


def _gathered(tensor: DTensor) -> Tensor:
    gathered = _Gather.apply(tensor)
    assert isinstance(gathered, Tensor)
    return gathered


class _Gather(torch.autograd.Function):
    """The whole tensor; its gradient is the mean over ranks, as that of weights which a forward
    gathers.
    """

    @staticmethod
    @override
    def forward(ctx: Any, tensor: DTensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return tensor.detach().full_tensor()  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad.is_cuda:
            torch.cuda.synchronize(
                grad.device
            )  # FSDP adds to the same gradient on a stream of its own
        summed = DTensor.from_local(grad / ctx.mesh.size(), ctx.mesh, [Partial()] * ctx.mesh.ndim)
        return summed.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in ctx.placements]
        )


def watch_weights(model: nn.Module) -> None:
    """Let a model's first forwards in training raise ConfigError if they change a weight.

    Call it before `fully_shard`. A forward has gathered copies of the weights, and changes of a
    copy are lost. Only a few forwards are watched, since a sum over each weight costs time.
    """
    before: dict[str, Tensor] = {}
    forwards_left = WATCHED_FORWARDS

    def sums_now() -> dict[str, Tensor]:
        gathered = {
            n: p.detach() for n, p in model.named_parameters() if not isinstance(p, DTensor)
        }
        return {n: sums(p) for n, p in gathered.items() if counts(p)}

    def begin(*_: Any) -> None:
        # of a forward that was computed again for backward, which ends it where it has what it
        # needs
        before.clear()
        before.update(sums_now() if forwards_left and model.training else {})

    def end(*_: Any) -> None:
        nonlocal forwards_left
        if before:
            forwards_left -= 1
            changed = [
                n for n, value in sums_now().items() if n in before and not alike(value, before[n])
            ]
            before.clear()
            if changed:
                raise ConfigError(
                    f"{type(model).__name__}.forward changes weights: {', '.join(changed[:3])} (an "
                    "initialization from "
                    "the first batch, or max_norm). Sharded over ranks, they are copies there, and "
                    "the change would be "
                    "lost. Move the change into the LightningModule, before the forward or into "
                    "on_train_batch_end, "
                    "where it works, or type strategy=ddp."
                )

    model.register_forward_pre_hook(unobserved(begin))
    model.register_forward_hook(unobserved(end))


def unobserved(hook: Callable[..., None]) -> Callable[..., None]:
    """Hide a hook's operators from dispatch modes: selective recomputation compares those of both
    forwards.
    """
    return _disable_current_modes()(hook)


def counts(weight: Tensor) -> bool:
    numbers = weight.is_floating_point() or weight.is_complex()  # not the codes of 4-bit weights
    return numbers and weight.element_size() > 1  # torch cannot add up float8


def sums(weight: Tensor) -> Tensor:
    dtype = torch.promote_types(
        weight.dtype, torch.float32
    )  # a sum in bf16 would not see a row that changes
    return torch.stack(
        [weight.sum(dtype=dtype), torch.linalg.vector_norm(weight, dtype=dtype).to(dtype)]
    )


def alike(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def learn_gradient_types(model: nn.Module) -> None:
    """Let FSDP look again at which weights are trained: a unit that was all frozen has no type for
    its gradients.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            unit: Any = part._get_fsdp_state()
            for group in getattr(unit, "_fsdp_param_groups", None) or [
                unit._fsdp_param_group
            ]:  # one in older torch
                if group is not None:
                    group._init_mp_dtypes()


# ---------------------------------------------------------------- attributes and hooks of weights
def carry_attributes(before: Iterable[tuple[str, nn.Parameter]], module: nn.Module) -> None:
    """Give parameters that took others' place the attributes of these, such as `_no_weight_decay`
    (S4, Mamba).
    """
    now = dict(module.named_parameters())
    for name, param in before:
        if name in now and now[name] is not param:
            vars(now[name]).update(
                {key: value for key, value in vars(param).items() if key not in vars(now[name])}
            )


def carry_hooks(model: nn.Module) -> None:
    """Let hooks that `weight.register_hook` has added see the gradients of gathered weights, each
    rank's own.

    Call it before `fully_shard`, which puts other tensors in place of the weights; their hooks
    would be lost.
    """
    known: dict[int, Tensor] = {}  # by id, of all owners: tied weights have several
    for owner in model.modules():
        hooks: dict[str, Mapping[Any, Any]] = {
            name: p._backward_hooks
            for name, p in owner._parameters.items()
            if p is not None and p._backward_hooks
        }
        if hooks:
            owner.register_forward_pre_hook(partial(_install, hooks, known))


def _install(
    hooks: dict[str, Mapping[Any, Any]], known: dict[int, Tensor], owner: nn.Module, _: Any
) -> None:
    for name, functions in hooks.items():
        weight = getattr(owner, name)  # gathered by now, and the same tensor in each forward
        if weight.requires_grad and id(weight) not in known:
            known[id(weight)] = weight
            weight.register_hook(partial(_call_each, functions))


def _call_each(functions: Mapping[Any, Any], grad: Tensor) -> Tensor:
    for function in functions.values():  # those that are not removed yet
        result = function(grad)
        grad = grad if result is None else result
    return grad


def names_with_lost_hooks(module: nn.Module, *, sharded: bool, carried: bool) -> list[str]:
    """Return the weights with hooks that would never be called.

    Args:
        sharded: whether the weights have been sharded. Then FSDP calls hooks for gradients that
            have been added, and no others; before, it is the other way round if hooks are
            `carried`.
    """
    if sharded:
        return [
            n
            for n, param in module.named_parameters()
            if isinstance(param, DTensor) and param._backward_hooks
        ]
    hooked = (
        (n, p._post_accumulate_grad_hooks or (not carried and p._backward_hooks))
        for n, p in module.named_parameters()
    )
    return [name for name, hooks in hooked if hooks]


def refuse_functional_calls(model: nn.Module) -> None:
    """Raise ConfigError where torch.func.functional_call computes with an FSDP unit, which may end
    the process.

    It puts other tensors in the place of weights, or keeps gathered ones, whose memory FSDP frees.
    """
    if isinstance(
        model, FSDPModule
    ):  # not parts of it: a head with hooks of others makes all logits
        model.register_forward_pre_hook(_check_caller, prepend=True)


def _check_caller(unit: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name == "_functional_call":
            raise ConfigError(
                f"{type(unit).__name__.removeprefix('FSDP')}: torch.func.functional_call puts "
                "tensors in the place of "
                "sharded weights, which FSDP cannot gather. Type strategy=ddp, or strategy=single."
            )


_FRAMES = 6  # of nn.Module between a hook and the caller
