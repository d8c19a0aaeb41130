"""The tensor axis: a model's matrices are sharded over ranks, as its plan says.

Exact, including the vocabulary's loss.

Activations between blocks are (B, T, D): batch, positions, width. With sequence parallelism each
rank holds a part of the positions (dim 1) there, otherwise each rank holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from typing_extensions import override

from armature.errors import ConfigError
from armature.finetune.nf4 import PARTS, Nf4Linear
from armature.models.adapters import ADAPTERS
from armature.models.autocast import to_compute_dtype
from armature.models.loss import VocabularyShard
from armature.models.plan import Plan
from armature.parallel import ties


def gathered(x: Tensor, device_mesh: DeviceMesh, layout: Shard | Replicate) -> DTensor:
    """Return all of x, a DTensor or this rank's part under `layout`, in the type in which it is
    computed with.
    """
    x = to_compute_dtype(x)  # the matrix products that follow would, after the gather
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, device_mesh, [layout], run_check=False)
    return x.redistribute(placements=[Replicate()])


class GatherInput(ParallelStyle):
    """All-gathers a module's first input once, for all the column-sharded Linears inside."""

    def __init__(self, layout: Shard | Replicate) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (gathered(args[0], device_mesh, self.layout), *args[1:])

        module.register_forward_pre_hook(gather)
        return module


class ReplicatedParameters(ParallelStyle):
    """Every rank holds all of a module's own parameters, and computes with them as a single process
    does.

    The parameters become DTensors like all others, since an optimizer cannot step both kinds in one
    call. In forward the module sees plain tensors.

    Args:
        gradient: Replicate if every rank computes the whole gradient, Partial if each adds a part
            of it.
    """

    def __init__(self, gradient: Replicate | Partial | None = None) -> None:
        self.gradient = gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        compute_with_parts(module, device_mesh, Replicate(), gradient=self.gradient)
        return module


class Logits(ColwiseParallel):
    """Shards the classes.

    A head that computes its loss from its own part of the classes is called with all positions.

    It says so by an attribute `vocabulary` (`models.decoder.loss.Head`).
    """

    def __init__(self, layout: Shard | Replicate) -> None:
        super().__init__(input_layouts=layout, output_layouts=Shard(-1))
        self.layout = layout

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not hasattr(module, "vocabulary"):
            return super()._apply(module, device_mesh)
        group, size = device_mesh.get_group(), module.weight.shape[0]  # pyright: ignore[reportIndexIssue]
        module.vocabulary = VocabularyShard(  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
            start=device_mesh.get_local_rank() * (size // device_mesh.size()),  # pyright: ignore[reportArgumentType]
            size=size,  # pyright: ignore[reportArgumentType]
            all_max=partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group),
            all_sum=partial(dist.all_reduce, group=group),
        )

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = gathered(args[0], device_mesh, self.layout)
            return (x.to_local(grad_placements=[Partial()]), *args[1:])

        module.register_forward_pre_hook(gather)
        compute_with_parts(module, device_mesh, Shard(0))
        return module


def compute_with_parts(
    module: nn.Module,
    device_mesh: DeviceMesh,
    placement: Placement,
    *,
    gradient: Placement | None = None,
) -> None:
    """Distribute a module's own parameters as DTensors, and let its forward see this rank's parts
    as plain tensors.

    Their gradients have `gradient`, by default the same placement.
    """
    params = {name: param for name, param in module._parameters.items() if param is not None}
    names = list(params)
    for name, param in params.items():
        distributed = distribute_tensor(param, device_mesh, [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(distributed, requires_grad=param.requires_grad)
    replaced: list[dict[str, nn.Parameter]] = []

    def show_plain_tensors(_: nn.Module, args: tuple[Any, ...]) -> None:
        replaced.append({name: module._parameters.pop(name) for name in names})  # pyright: ignore[reportArgumentType]
        for name, param in replaced[-1].items():
            module.__dict__[name] = param.to_local(grad_placements=[gradient or placement])  # pyright: ignore[reportAttributeAccessIssue]

    def restore_parameters(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for name, param in replaced.pop().items():
            del module.__dict__[name]
            module._parameters[name] = param

    module.register_forward_pre_hook(show_plain_tensors)
    module.register_forward_hook(restore_parameters, always_call=True)


def torch_styles(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Return torch's style for each name in `models.plan.TENSOR_STYLES`."""
    between_blocks = Shard(1) if sequence_parallel else Replicate()
    return {
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=between_blocks),
        "column_gathered": ColwiseParallel(output_layouts=Replicate()),
        "row_of_whole": RowwiseParallel(input_layouts=Replicate(), output_layouts=between_blocks),
        "vocabulary": RowwiseParallel(input_layouts=Replicate(), output_layouts=between_blocks),
        "logits": Logits(between_blocks),
        "sequence": SequenceParallel(use_local_output=True)
        if sequence_parallel
        else ReplicatedParameters(),
        "heads": ReplicatedParameters(Partial()),
        "gather": GatherInput(between_blocks),
    }


def match_styles(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Return the tensor style of each module that a pattern of the plan names; the last matching
    pattern wins.
    """
    names = [name for name, _ in model.named_modules()]
    styles, problems = {}, []
    for pattern, style in plan.tensor.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        styles |= dict.fromkeys(matching, style)
        if not matching and pattern not in plan.optional:
            problems.append(
                f"The plan's tensor pattern {pattern!r} matches no module of "
                f"{type(model).__name__}: correct plan.py"
            )
    if problems:
        raise ConfigError(problems)
    return styles


def shard_modules(
    model: nn.Module, styles: dict[str, str], *, mesh: DeviceMesh, sequence_parallel: bool
) -> None:
    """Shard the modules that this rank holds, and replicate every parameter that no style names."""
    tied, by_name = ties.find(model), torch_styles(sequence_parallel=sequence_parallel)
    frozen = {
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if not param.requires_grad
    }
    for name, module in model.named_modules():
        if name in styles:
            adapters = {
                each: module._parameters.pop(each)
                for each in ADAPTERS
                if each in module._parameters
            }
            with (
                divided_as_weight(module, mesh) if isinstance(module, Nf4Linear) else nullcontext()
            ):
                parallelize_module(module, mesh, by_name[styles[name]], src_data_rank=None)
            divide_adapter(module, adapters, mesh=mesh, style=styles[name])
        own = list(module.parameters(recurse=False))
        if own and not any(isinstance(param, DTensor) for param in own):
            parallelize_module(module, mesh, ReplicatedParameters())
    ties.restore(model, tied)
    for name, param in model.named_parameters(remove_duplicate=False):
        # torch's SequenceParallel makes new parameters, which are trained
        param.requires_grad_(name not in frozen)


_COLUMNS, _ROWS = ("column", "column_gathered"), ("row", "row_of_whole")  # styles of Linears


def adapter_problem(style: str) -> str | None:
    """Return why a Linear of this tensor style takes no adapter, or None."""
    if style in (*_COLUMNS, *_ROWS):
        return None
    return (
        f"task.adapter: a Linear whose tensor style is {style!r} takes no adapter under a tensor "
        "axis. Leave it out of "
        "task.adapter.targets, or type strategy=fsdp."
    )


@contextmanager
def divided_as_weight(module: Nf4Linear, mesh: DeviceMesh) -> Iterator[None]:
    """Divide a matrix of 4 bits as the style within the context divides a parameter `weight`, which
    it lacks.
    """
    parts = {name: module._parameters.pop(name) for name in PARTS}
    stand_in = torch.empty(module.out_features, module.in_features, device="meta")
    module.register_parameter("weight", nn.Parameter(stand_in, requires_grad=False))
    yield
    weight: Any = module._parameters.pop("weight")
    for name, part in parts.items():
        assert part is not None
        columns = weight.placements == (Shard(1),)
        placements = [Replicate()] if columns and name == "row" else weight.placements
        distributed = distribute_tensor(part, mesh, placements, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, requires_grad=False))


def divide_adapter(
    module: nn.Module, adapters: dict[str, nn.Parameter | None], *, mesh: DeviceMesh, style: str
) -> None:
    """Distribute an adapter (`finetune.lora`) as its matrix: of a column-sharded one the rows of B
    and of the magnitudes, of a row-sharded one A's columns. The rest is whole on every rank.
    """
    of_rows: dict[str, Placement] = {"lora_B": Shard(0)}
    placements = of_rows if style in _COLUMNS else {"lora_A": Shard(1)}
    for name, param in adapters.items():
        assert param is not None
        if (problem := adapter_problem(style)) is not None:
            raise ConfigError(problem)
        distributed = distribute_tensor(
            param, mesh, [placements.get(name, Replicate())], src_data_rank=None
        )
        module._parameters[name] = nn.Parameter(distributed, requires_grad=param.requires_grad)


# slots: functools.wraps copies a __dict__, and with it whose loss this is
@dataclass(frozen=True, slots=True)
class ShardedLoss:
    """A model's loss, called with outputs whose classes (the last dim) are sharded over `mesh`."""

    unsharded: Callable[[Tensor, Tensor], Tensor]
    mesh: DeviceMesh

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        value = self.unsharded(self.as_dtensor(outputs), targets)
        return value.full_tensor() if isinstance(value, DTensor) else value

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
