"""The tensor axis: a model's matrices divided over ranks, as its plan says. Exact, the vocabulary's loss included."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from armature.errors import ConfigError
from armature.models.plan import Plan
from armature.parallel import ties


class Gather(ParallelStyle):
    """Brings a module's first input together once, for all the columns inside."""

    def __init__(self, layout: Shard | Replicate) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = args[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [self.layout], run_check=False)
            return (x.redistribute(placements=[Replicate()]), *args[1:])

        module.register_forward_pre_hook(gather)
        return module


class Whole(ParallelStyle):
    """Every rank holds a module's own parameters, and computes with them as if it were alone.

    They become DTensors like all others, since optimizers do not step both kinds in one call, and the module sees
    plain tensors.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, param in module._parameters.items() if param is not None]
        for name in names:
            param = module._parameters[name]
            assert param is not None
            whole = distribute_tensor(param, device_mesh, [Replicate()], src_data_rank=None)
            module._parameters[name] = nn.Parameter(whole, requires_grad=param.requires_grad)
        held: list[dict[str, nn.Parameter]] = []

        def lend(_: nn.Module, args: tuple[Any, ...]) -> None:
            held.append({name: module._parameters.pop(name) for name in names})  # pyright: ignore[reportArgumentType]
            for name, param in held[-1].items():
                module.__dict__[name] = param.to_local(grad_placements=[Replicate()])  # pyright: ignore[reportAttributeAccessIssue]

        def give_back(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for name, param in held.pop().items():
                del module.__dict__[name]
                module._parameters[name] = param

        module.register_forward_pre_hook(lend)
        module.register_forward_hook(give_back, always_call=True)
        return module


def styles(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """What the words of a plan mean; `between` is how activations lie between blocks."""
    between = Shard(1) if sequence_parallel else Replicate()
    return {
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=between),
        "vocabulary": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "logits": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1)),
        "sequence": SequenceParallel(use_local_output=True) if sequence_parallel else Whole(),
        "gather": Gather(between),
    }


def matches(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Names of modules, to the style that the last matching pattern gives them.

    Raises:
        ConfigError: for a pattern that names no module.
    """
    names = [name for name, _ in model.named_modules()]
    found: dict[str, str] = {}
    idle = []
    for pattern, style in plan.tensor.items():
        named = [name for name in names if fnmatchcase(name, pattern)]
        found |= dict.fromkeys(named, style)
        if not named:
            idle.append(pattern)
    if idle:
        raise ConfigError(
            [
                f"The plan's tensor pattern {p!r} matches no module of {type(model).__name__}: correct plan.py"
                for p in idle
            ]
        )
    return found


def parallelize(model: nn.Module, found: dict[str, str], *, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Divide the modules that a rank holds, and keep everything else whole on each rank."""
    tied = ties.find(model)
    meaning = styles(sequence_parallel=sequence_parallel)
    for name, module in model.named_modules():
        if name in found:
            parallelize_module(module, mesh, meaning[found[name]], src_data_rank=None)
        own = [param for param in module._parameters.values() if param is not None]
        if own and not any(isinstance(param, DTensor) for param in own):
            parallelize_module(module, mesh, Whole())
    ties.restore(model, tied)


def divide_loss(model: nn.Module, *, mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Let the model's loss take outputs whose classes are divided over ranks, through torch's loss_parallel.

    Returns:
        What makes undivided outputs of such divided ones.
    """
    loss: Callable[[Tensor, Tensor], Tensor] = model.loss  # pyright: ignore[reportAssignmentType]

    def as_divided(outputs: Tensor) -> DTensor:
        return DTensor.from_local(outputs, mesh, [Shard(-1)], run_check=False)

    def divided_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(as_divided(outputs), targets)
        return value.full_tensor() if isinstance(value, DTensor) else value

    model.__dict__["loss"] = divided_loss
    return lambda outputs: as_divided(outputs).full_tensor()


def gather_when_asked(model: nn.Module, whole: Callable[[Tensor], Tensor]) -> None:
    """Give undivided outputs to whoever calls the model without targets."""

    def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        wants_loss = (len(args) > 1 and args[1] is not None) or kwargs.get("targets") is not None
        return output if wants_loss else whole(output)

    model.register_forward_hook(gather, with_kwargs=True)
