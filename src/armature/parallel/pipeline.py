"""The pipeline axis: a model cut into stages, and a schedule that runs when the model is called with targets.

Lightning calls zero_grad between training_step and backward, but a schedule makes gradients inside training_step. They
are set aside there and handed over in backward by an autograd node (`HandOver`), so that accumulation, the division of
the loss and clipping need no special case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from armature.errors import ConfigError
from armature.models.loss import IGNORED
from armature.models.plan import Plan
from armature.parallel.split import SCHEDULES, balanced, stages_of_rank
from armature.parallel.targets import UNIT, TargetWeights

CLASSES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
}


# ---------------------------------------------------------------- cutting
@dataclass
class Stages:
    """What this rank holds: `parts[i]` is a view of the model with the blocks of stage `indices[i]` only."""

    indices: list[int]
    count: int
    parts: list[nn.Module]


def split(
    model: nn.Module, plan: Plan, *, rank: int, ranks: int, schedule: str, by_hand: list[int] | None = None
) -> Stages:
    """Delete from the model what this rank does not hold, and give a view of it for each stage.

    Names never change: what is deleted leaves a gap, and an end that is not here is None.

    Args:
        by_hand: how many blocks each stage holds; None: balanced by parameter count, the ends counted.

    Raises:
        ConfigError: for parameters that stand directly on the model, which belong to no stage.
    """
    if loose := [name for name, param in model._parameters.items() if param is not None]:
        raise ConfigError(
            f"{type(model).__name__} holds {', '.join(loose)} itself, so no pipeline stage owns it. Put it into a "
            "submodule that the plan names in first or last."
        )
    blocks: nn.ModuleDict = model.get_submodule(plan.blocks)  # pyright: ignore[reportAssignmentType]
    names, count = list(blocks), ranks * SCHEDULES[schedule][0]

    def cost(module: nn.Module | None) -> int:
        return sum(p.numel() for p in module.parameters()) if module is not None else 0

    sizes = by_hand or balanced(
        [cost(block) for block in blocks.values()],
        stages=count,
        first=sum(cost(getattr(model, end)) for end in plan.first),
        last=sum(cost(getattr(model, end)) for end in plan.last),
    )
    starts = [sum(sizes[:i]) for i in range(count)]
    held = {i: names[starts[i] : starts[i] + sizes[i]] for i in stages_of_rank(rank, ranks=ranks, schedule=schedule)}
    for name in names:
        if not any(name in of_stage for of_stage in held.values()):
            del blocks[name]
    for ends, stage in ((plan.first, 0), (plan.last, count - 1)):
        if stage not in held:
            for end in ends:
                setattr(model, end, None)
    parts = [_view(model, plan, names=held[i], first=i == 0, last=i == count - 1) for i in held]
    return Stages(indices=list(held), count=count, parts=parts)


def _view(model: nn.Module, plan: Plan, *, names: list[str], first: bool, last: bool) -> nn.Module:
    """The model with some of its blocks: shares their parameters, but is a module of its own to call and to shard."""
    view = copy.copy(model)
    for name, value in view.__dict__.items():
        if isinstance(value, dict) and name not in ("_parameters", "_buffers"):
            view.__dict__[name] = copy.copy(value)  # hooks, too, are a view's own
    blocks: nn.ModuleDict = model.get_submodule(plan.blocks)  # pyright: ignore[reportAssignmentType]
    view._modules[plan.blocks] = nn.ModuleDict({name: blocks[name] for name in names})
    for ends, here in ((plan.first, first), (plan.last, last)):
        if not here:
            view._modules |= dict.fromkeys(ends, None)
    return view


# ---------------------------------------------------------------- running
class HandOver(torch.autograd.Function):
    """The loss of a step of the schedule, whose backward adds the gradients that the schedule has made.

    They are those of the loss multiplied by `count`, where that is given.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, params: list[Tensor], grads: list[Tensor | None], count: Tensor | None
    ) -> Tensor:
        ctx.pairs, ctx.count = list(zip(params, grads, strict=True)), count
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None, None]:
        (scale,) = grad_outputs
        scale = scale if ctx.count is None else scale / ctx.count
        for param, grad in ctx.pairs:
            if grad is None:
                continue
            local(grad).mul_(scale)
            if param.grad is None:
                param.grad = grad
            else:
                local(param.grad).add_(local(grad))
        return None, None, None, None


def local(tensor: Tensor) -> Tensor:
    """This rank's part: sums and products by a number need no more, even where parts are still to be added up."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def grads_aside(params: list[nn.Parameter]) -> Iterator[None]:
    """No gradients inside, and those of before afterwards."""
    kept = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad


@dataclass
class Runner:
    """Runs a rank's stages. Called with inputs and targets it gives the loss, with inputs alone the outputs."""

    model: nn.Module
    stages: Stages
    group: dist.ProcessGroup
    device: torch.device
    schedule: str
    microbatches: int
    whole_outputs: Callable[[Tensor], Tensor]
    prepared: dict[Any, Any] = field(default_factory=dict)
    shapes: dict[Any, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    weights: TargetWeights | None = None
    valid: Tensor | None = None  # targets that a micro-batch's loss is divided by

    def __call__(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        for part in self.stages.parts:
            part.training = self.model.training
        if torch.is_grad_enabled():
            if targets is None:
                raise RuntimeError("Under a pipeline, training calls model(inputs, targets) and gets the loss.")
            return self.train(inputs, targets)
        outputs = self.forward(inputs)
        if targets is not None:
            return self._from_last(None if outputs is None else self.model.loss(outputs, targets), scalar=True)  # pyright: ignore[reportCallIssue]
        return self._from_last(None if outputs is None else self.whole_outputs(outputs), scalar=False)

    @property
    def holds_last(self) -> bool:
        return self.stages.count - 1 in self.stages.indices

    # ------------------------------------------------------------ training
    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss over the valid targets of all of them.

        Where `weights` counts targets, gradients are multiplied by their number, since they are made here.
        """
        schedule, losses = self._schedule(inputs), []
        params = list({param: None for part in self.stages.parts for param in part.parameters()})
        self.valid = None if targets.is_floating_point() else (targets != IGNORED).sum().clamp(min=1)
        count = None if self.weights is None else self.weights.current
        if count is not None:
            self.valid = torch.full_like(count, UNIT)
        with grads_aside(params):
            schedule.step(
                *((inputs,) if 0 in self.stages.indices else ()),
                target=targets if self.holds_last else None,
                losses=losses if self.holds_last else None,
                return_outputs=False,
            )
            made = [param.grad for param in params]
        loss = self._from_last(torch.stack([part.detach() for part in losses]).mean() if losses else None, scalar=True)
        if count is not None:
            loss = loss / count
        return HandOver.apply(loss.requires_grad_(), params, made, count)  # pyright: ignore[reportReturnType]

    def _weighted_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's mean loss, weighted so that the mean over micro-batches is that over all valid targets."""
        loss = self.model.loss(outputs, targets)  # pyright: ignore[reportCallIssue]
        if self.valid is None:
            return loss
        return loss * ((targets != IGNORED).sum() * self.microbatches / self.valid)

    def _schedule(self, inputs: Tensor) -> Any:
        """The schedule for inputs of this shape; torch fixes the shapes that stages exchange at the first step."""
        key = (inputs.shape, inputs.dtype)
        if key not in self.prepared:
            stages = [
                PipelineStage(part, index, self.stages.count, self.device, group=self.group)
                for part, index in zip(self.stages.parts, self.stages.indices, strict=True)
            ]
            self.prepared[key] = CLASSES[self.schedule](
                stages if SCHEDULES[self.schedule][0] > 1 else stages[0],
                n_microbatches=self.microbatches,
                loss_fn=self._weighted_loss,
            )
        return self.prepared[key]

    # ------------------------------------------------------------ evaluation
    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor | None:
        """The outputs, on the ranks of the last stage; any batch size, in as many micro-batches as it gives."""
        chunks = inputs.chunk(min(self.microbatches, len(inputs)))
        outputs: list[Tensor] = []
        sent: list[tuple[dist.Work, Tensor]] = []
        for stage, part in zip(self.stages.indices, self.stages.parts, strict=True):
            given, outputs = (outputs if stage - 1 in self.stages.indices else None), []
            for i, chunk in enumerate(chunks):
                if stage > 0:
                    chunk = given[i] if given is not None else self._receive(stage, key=(stage, chunk.shape))
                y = part(chunk)
                outputs.append(y)
                if stage + 1 < self.stages.count and stage + 1 not in self.stages.indices:
                    sent += self._send(y, stage, key=(stage + 1, chunks[i].shape))
        for work, _ in sent:
            work.wait()
        return torch.cat(outputs) if self.holds_last else None

    def _rank_of(self, stage: int) -> int:
        """The global rank that holds a stage."""
        ranks = self.group.size()
        holder = next(r for r in range(ranks) if stage in stages_of_rank(r, ranks=ranks, schedule=self.schedule))
        return dist.get_global_rank(self.group, holder)

    def _send(self, y: Tensor, stage: int, *, key: Any) -> list[tuple[dist.Work, Tensor]]:
        """Start to send; the shape goes first, the first time that there are inputs of this shape."""
        y, to = y.contiguous(), self._rank_of(stage + 1)
        if key not in self.shapes:
            self.shapes[key] = (y.shape, y.dtype)
            dist.send_object_list([(tuple(y.shape), y.dtype)], dst=to, group=self.group, device=self.device)
        work = dist.isend(y, dst=to, group=self.group)
        assert work is not None
        return [(work, y)]

    def _receive(self, stage: int, *, key: Any) -> Tensor:
        source = self._rank_of(stage - 1)
        if key not in self.shapes:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=source, group=self.group, device=self.device)
            self.shapes[key] = box[0]
        shape, dtype = self.shapes[key]
        x = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(x, src=source, group=self.group)
        return x

    def _from_last(self, value: Tensor | None, *, scalar: bool) -> Tensor:
        """What the last stage has, on every stage."""
        source, shape = self._rank_of(self.stages.count - 1), ()
        if not scalar:
            box: list[Any] = [tuple(value.shape) if value is not None else None]
            dist.broadcast_object_list(box, src=source, group=self.group, device=self.device)
            shape = box[0]
        value = torch.empty(shape, device=self.device) if value is None else value
        value = value.float().contiguous()  # the default type is not fp32 under bf16-true
        dist.broadcast(value, src=source, group=self.group)
        return value


def pipelined(model: nn.Module, runner: Runner) -> None:
    """Calling the model runs its pipeline. Its class is swapped, since a wrapper would prefix its names."""
    base = type(model)

    def call(self: nn.Module, *args: Any) -> Tensor:
        return self.__dict__["_runner"](*args)

    model.__dict__["_runner"] = runner
    model.__class__ = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})
