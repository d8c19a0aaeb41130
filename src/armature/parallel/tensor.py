"""The tensor axis: a model's matrices divided over ranks, as its plan says. Exact, the vocabulary's loss included."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from armature.errors import ConfigError
from armature.parallel import ties
from armature.parallel.plan import Plan


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

    They become DTensors like all others, since optimisers do not step both kinds in one call, and the module sees
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
            [f"The plan's tensor pattern {p!r} matches no module of {type(model).__name__}: correct plan.py" for p in idle]
        )
    return found


def parallelize(model: nn.Module, found: dict[str, str], *, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Divide the modules that a rank holds, and keep everything else whole on each rank."""
    tied = ties.find(model)
    meaning = styles(sequence_parallel=sequence_parallel)
    for name, module in model.named_modules():
        if name in found:
            parallelize_module(module, mesh, meaning[found[name]], src_data_rank=None)
        if module._parameters and not any(isinstance(p, DTensor) for p in module._parameters.values()):
            parallelize_module(module, mesh, Whole())
    ties.restore(model, tied)


class DividedLoss:
    """A model's loss of outputs whose classes are divided over ranks, through torch's loss_parallel."""

    def __init__(self, loss: Any, *, mesh: DeviceMesh) -> None:
        self.loss, self.mesh = loss, mesh

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        divided = DTensor.from_local(outputs, self.mesh, [Shard(-1)], run_check=False)
        loss = self.loss(divided, targets)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


def gather_outputs(outputs: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Undivided outputs, for whoever asked the model for them rather than for its loss."""
    return DTensor.from_local(outputs, mesh, [Shard(-1)], run_check=False).full_tensor()
