"""The tensor axis: a model's matrices are sharded over ranks, as its plan says.

Weights are DTensors, so that checkpoints, optimizers and norms know what they are a part of. While
a block computes, its modules see this rank's parts as plain tensors, and hooks around the modules
exchange activations: a block takes little more host time than on one device, and compiles as there.

Activations between blocks are (B, T, D): batch, positions, width. With sequence parallelism each
rank holds a part of the positions (dim 1) there, otherwise each rank holds all of them.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from typing_extensions import override

from armature.errors import ConfigError
from armature.models.adapters import is_adapter
from armature.models.autocast import to_compute_dtype
from armature.models.loss import VocabularyShard
from armature.models.plan import Plan
from armature.parallel import randomness
from armature.parallel.functional import Ranks
from armature.parallel.whole_weights import whole

POSITIONS, FEATURES = 1, -1  # dims of activations
_COLUMNS, _ROWS = ("column", "column_gathered"), ("row", "row_of_whole")  # styles of Linears


# ---------------------------------------------------------------- weights
@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of a module, and what of it a rank computes with.

    Attributes:
        summed: each rank computes a summand of the gradient of its part.
        first_only: ranks other than the first see zeros: their outputs are added up.
    """

    owner: nn.Module
    name: str
    placement: Placement
    summed: bool = False
    first_only: bool = False


class LocalWeights:
    """Shows weights as plain tensors, this rank's parts, while a module computes."""

    def __init__(self, mesh: DeviceMesh, weights: list[Weight]) -> None:
        self.mesh, self.ranks, self.weights = mesh, Ranks.of(mesh.get_group()), weights

    def show(self, *_: Any) -> None:
        # FSDP puts others there while they are gathered
        params = [weight.owner._parameters[weight.name] for weight in self.weights]
        for weight, part in zip(self.weights, _Parts.apply(self, *params), strict=True):
            weight.owner.__dict__[weight.name] = part

    def hide(self, *_: Any) -> None:
        for weight in self.weights:
            weight.owner.__dict__.pop(weight.name, None)

    def around(self, module: nn.Module) -> None:
        """Show them inside of the module's forward, so that a recomputation finds them, too."""
        forward = module.forward

        @wraps(forward)
        def with_parts(*args: Any, **kwargs: Any) -> Any:
            self.show()
            try:
                return forward(*args, **kwargs)
            finally:
                self.hide()

        module.forward = with_parts

    def hook(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.show)
        module.register_forward_hook(self.hide, always_call=True)


class _Parts(torch.autograd.Function):
    """This rank's parts of DTensors. Their gradients become DTensors with the same placements."""

    @staticmethod
    @override
    def forward(ctx: Any, local: LocalWeights, *params: DTensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.local, ctx.shapes = local, [(param.shape, param.stride()) for param in params]
        parts = [
            torch.zeros_like(param.to_local())
            if weight.first_only and local.ranks.rank
            else param.to_local().detach()
            for weight, param in zip(local.weights, params, strict=True)
        ]
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(p for p, n in zip(parts, needed, strict=True) if not n))
        return tuple(parts)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        local, found = ctx.local, [*grads]
        alike: dict[torch.dtype, list[int]] = {}
        for i, (weight, grad) in enumerate(zip(local.weights, found, strict=True)):
            if grad is not None and weight.summed:
                alike.setdefault(grad.dtype, []).append(i)
                if weight.first_only and local.ranks.rank:
                    found[i] = torch.zeros_like(grad)
        for places in alike.values():
            summands: list[Any] = [found[i] for i in places]
            total = local.ranks.sum(torch.cat([each.reshape(-1) for each in summands]))
            lengths = [each.numel() for each in summands]
            for i, grad in zip(places, total.split(lengths), strict=True):
                found[i] = grad.view_as(found[i])
        gathered = [
            grad
            if grad is None
            else DTensor.from_local(
                grad, local.mesh, [weight.placement], run_check=False, shape=shape, stride=stride
            )
            for weight, grad, (shape, stride) in zip(local.weights, found, ctx.shapes, strict=True)
        ]
        return None, *gathered


def _weight(owner: nn.Module, name: str, style: str | None, *, sequence_parallel: bool) -> Weight:
    """Return what a rank has of a parameter, by its name and its module's style.

    Of a row-sharded Linear's adapter (`finetune.lora`) the ranks' A are parts and B is whole; of
    its 4 bits (`finetune.nf4`) `row` is that of whole rows.
    """
    if style in _COLUMNS:
        return Weight(owner, name, Replicate() if (a := name == "lora_A") else Shard(0), summed=a)
    if style in _ROWS:
        if name in ("bias", "lora_B", "row"):
            return Weight(owner, name, Replicate(), summed=True, first_only=name == "bias")
        return Weight(owner, name, Shard(1))
    if style in ("vocabulary", "logits"):
        return Weight(owner, name, Shard(0))
    summed = style == "heads" or (style == "sequence" and sequence_parallel)
    return Weight(owner, name, Replicate(), summed=summed)


def adapter_problem(style: str) -> str | None:
    """Return why a Linear of this tensor style takes no adapter, or None."""
    if style in (*_COLUMNS, *_ROWS):
        return None
    return (
        f"task.adapter: a Linear whose tensor style is {style!r} takes no adapter under a tensor "
        "axis. Leave it out of task.adapter.targets, or type strategy=fsdp."
    )


# ---------------------------------------------------------------- activations
class Exchange:
    """What ranks exchange before and after modules.

    Args:
        sequence_parallel: between blocks each rank holds a part of the positions.
    """

    def __init__(self, ranks: Ranks, *, sequence_parallel: bool) -> None:
        self.ranks, self.sequence_parallel = ranks, sequence_parallel
        # the same functions for all modules: else each block would compile code of its own
        self._whole, self._each = _before(self.from_between_blocks), _before(ranks.to_each)
        self._own = _before(partial(ranks.to_own, dim=FEATURES))
        self._sum = _after(self.to_between_blocks)
        self._all = _after(partial(ranks.to_all, dim=FEATURES))

    def add_to(self, module: nn.Module, style: str | None, *, gathered: bool) -> None:
        """Add the exchanges of a style to a module.

        Args:
            gathered: a module around it has gathered its input.
        """
        if style in ("gather", "logits"):
            module.register_forward_pre_hook(self._whole)
        elif style in _COLUMNS and not gathered:
            module.register_forward_pre_hook(self._each)
        elif style == "row_of_whole":
            module.register_forward_pre_hook(self._own)
        if style in _ROWS:
            module.register_forward_hook(self._sum)
        elif style == "column_gathered":
            module.register_forward_hook(self._all)
        elif style == "vocabulary":
            module.forward = partial(self.look_up, module.forward, module)

    def from_between_blocks(self, x: Tensor) -> Tensor:
        """Return all positions of x, in the type in which the matrix products that follow take
        it.
        """
        x = to_compute_dtype(x)
        return (
            self.ranks.to_whole(x, POSITIONS) if self.sequence_parallel else self.ranks.to_each(x)
        )

    def to_between_blocks(self, x: Tensor) -> Tensor:
        """Add up the ranks' summands, and keep what a rank holds between blocks."""
        if not self.sequence_parallel:
            return self.ranks.to_sum(x)
        if x.shape[POSITIONS] % self.ranks.size:
            raise ConfigError(
                f"strategy.tensor={self.ranks.size} does not divide the {x.shape[POSITIONS]} "
                f"positions (dim {POSITIONS}) of a batch. Type another length, or "
                "strategy.sequence_parallel=false."
            )
        return self.ranks.to_parts(x, POSITIONS)

    def look_up(self, forward: Callable[[Tensor], Tensor], embedding: Any, ids: Tensor) -> Tensor:
        """Return the rows of ids: each rank looks up those that it has."""
        rows = embedding.weight.shape[0]
        ids = ids - rows * self.ranks.rank
        elsewhere = (ids < 0) | (ids >= rows)
        found = forward(ids.masked_fill(elsewhere, 0))
        return self.to_between_blocks(found.masked_fill_(elsewhere.unsqueeze(-1), 0.0))


def _before(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda _, args: (change(args[0]), *args[1:])


def _after(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda _, args, output: change(output)


# ---------------------------------------------------------------- models
def matching(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules that a pattern of a plan names."""
    return [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]


def styles_of(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module that a pattern names; the last matching pattern wins."""
    return {name: style for pattern, style in styles.items() for name in matching(model, pattern)}


def match_styles(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Return the tensor style of each module that a pattern of the plan names.

    Raises ConfigError for patterns that match none.
    """
    if lacking := [p for p in plan.tensor if p not in plan.optional and not matching(model, p)]:
        name = type(model).__name__
        raise ConfigError([
            f"The plan's tensor pattern {p!r} matches no module of {name}: correct plan.py"
            for p in lacking
        ])  # fmt: skip
    return styles_of(model, plan.tensor)


def shard_modules(
    model: nn.Module,
    styles: dict[str, str],
    *,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    blocks: Iterable[nn.Module],
) -> dict[nn.Module, LocalWeights]:
    """Shard the modules that this rank holds, and replicate every parameter that no style names.

    Returns:
        What shows the weights of each of the `blocks`, for the caller to put around it. All other
        modules are ready.
    """
    exchange = Exchange(Ranks.of(mesh.get_group()), sequence_parallel=sequence_parallel)
    sharded: dict[nn.Parameter, Any] = {}  # tied ones stay tied
    scopes = {inner: block for block in blocks for inner in block.modules()}
    shown: dict[nn.Module, list[Weight]] = {}
    for name, module in [*model.named_modules()]:
        above = [styles.get(name[:end]) for end, letter in enumerate(name) if letter == "."]
        style = styles.get(name)
        exchange.add_to(module, style, gathered="gather" in above)
        if style is None and above and above[-1] in ("sequence", "heads"):
            style = above[-1]  # a norm inside a module of its own
        own = {key: param for key, param in module._parameters.items() if param is not None}
        if any(isinstance(param, DTensor) for param in own.values()):
            continue  # experts, which have ranks of their own
        weights = [_weight(module, key, style, sequence_parallel=sequence_parallel) for key in own]
        for weight in weights:
            param = own[weight.name]
            if is_adapter(weight.name) and style and (problem := adapter_problem(style)):
                raise ConfigError(problem)
            if param not in sharded:
                part = distribute_tensor(param, mesh, [weight.placement], src_data_rank=None)
                sharded[param] = nn.Parameter(part, requires_grad=param.requires_grad)
            elif sharded[param].placements != (weight.placement,):
                raise ValueError(
                    f"{name}.{weight.name} has two names, whose tensor styles shard it "
                    "differently: give both styles that shard the same dim in plan.py."
                )
            module._parameters[weight.name] = sharded[param]
        # such a module is gathered by itself
        alone = getattr(module, "full_precision", False)
        shown.setdefault(module if alone else scopes.get(module, module), []).extend(weights)
        if style == "logits" and hasattr(module, "vocabulary"):
            module.vocabulary = _vocabulary(mesh, weights[0])  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    found = {module: LocalWeights(mesh, weights) for module, weights in shown.items() if weights}
    of_blocks = {module: local for module, local in found.items() if scopes.get(module) is module}
    for module, local in found.items():
        if module not in of_blocks:
            local.hook(module)
    return of_blocks


def _vocabulary(mesh: DeviceMesh, weight: Weight) -> VocabularyShard:
    """Return what a head needs to know that computes its loss from its own part of the classes.

    It says that it does by an attribute `vocabulary` (`models.decoder.loss.Head`).
    """
    group, size = mesh.get_group(), weight.owner._parameters[weight.name].shape[0]  # pyright: ignore[reportOptionalMemberAccess]
    return VocabularyShard(
        start=mesh.get_local_rank() * (size // mesh.size()),
        size=size,
        all_max=partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group),
        all_sum=partial(dist.all_reduce, group=group),
    )


def overlaps(asked: bool | str, mesh: DeviceMesh) -> bool:
    """Return whether collectives are overlapped with matrix products; auto: if all ranks are GPUs
    of this machine that read each other's memory.
    """
    if asked != "auto":
        return bool(asked)
    ranks, local = mesh.mesh.flatten().tolist(), torch.cuda.device_count()
    if mesh.device_type != "cuda" or len({rank // local for rank in ranks}) > 1:
        return False
    here = torch.cuda.current_device()
    others = {rank % local for rank in ranks} - {here}
    return all(torch.cuda.can_device_access_peer(here, other) for other in others)


def draw_apart(model: nn.Module, place: int) -> None:
    """Let ranks that hold different positions drop different ones while the model trains."""
    running: list[ExitStack] = []

    def begin(*_: Any) -> None:
        running.append(ExitStack())
        if model.training:
            running[-1].enter_context(randomness.own_draws(place))

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda *_: running.pop().close(), always_call=True)


# slots: functools.wraps copies a __dict__, and with it whose loss this is
@dataclass(frozen=True, slots=True)
class ShardedLoss:
    """A model's loss, called with outputs whose classes (the last dim) are sharded over `mesh`."""

    unsharded: Callable[[Tensor, Tensor], Tensor]
    mesh: DeviceMesh

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return whole(self.unsharded(self.as_dtensor(outputs), targets))

    def as_dtensor(self, outputs: Tensor) -> DTensor:
        return DTensor.from_local(outputs, self.mesh, [Shard(-1)], run_check=False)


def shard_loss(model: nn.Module, *, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Let the model's loss take outputs whose classes (the last dim) are sharded, through torch's
    loss_parallel.

    Return a function that all-gathers such outputs: (…, classes / ranks) to (…, classes).
    """
    loss = model.__dict__["loss"] = ShardedLoss(model.loss, mesh)  # pyright: ignore[reportArgumentType]
    return lambda outputs: loss.as_dtensor(outputs).full_tensor()


def gather_outputs(model: nn.Module, unshard: Callable[[Tensor], Tensor]) -> None:
    """Return unsharded outputs from calls of the model without targets; calls with targets return
    the loss as it is.
    """

    def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        has_targets = (len(args) > 1 and args[1] is not None) or kwargs.get("targets") is not None
        return output if has_targets else unshard(output)

    model.register_forward_hook(gather, with_kwargs=True)
