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

from armature.parallel.plan import Plan
from armature.parallel.split import SCHEDULES, balanced, stages_of_rank

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
    """
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
    """The same model with some of its blocks: shares their parameters, but is a module of its own to call and to shard."""
    view = copy.copy(model)
    view._modules = dict(model._modules)
    blocks: nn.ModuleDict = model.get_submodule(plan.blocks)  # pyright: ignore[reportAssignmentType]
    view._modules[plan.blocks] = nn.ModuleDict({name: blocks[name] for name in names})
    for ends, here in ((plan.first, first), (plan.last, last)):
        if not here:
            view._modules |= dict.fromkeys(ends, None)
    return view


# ---------------------------------------------------------------- running
class HandOver(torch.autograd.Function):
    """The loss of a step of the schedule, whose backward adds the gradients that the schedule has made."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, params: list[Tensor], grads: list[Tensor | None]) -> Tensor:
        ctx.pairs = list(zip(params, grads, strict=True))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None]:
        (scale,) = grad_outputs
        for param, grad in ctx.pairs:
            if grad is not None:
                grad.mul_(scale)
                param.grad = grad if param.grad is None else param.grad + grad
        return None, None, None


@dataclass
class Runner:
    """Runs a rank's stages. Called with inputs and targets it gives the loss, with inputs alone the outputs."""

    stages: Stages
    group: dist.ProcessGroup
    device: torch.device
    schedule: str
    microbatches: int
    loss: Callable[[Tensor, Tensor], Tensor]
    whole_outputs: Callable[[Tensor], Tensor]
    prepared: dict[Any, Any] = field(default_factory=dict)
    valid: Tensor | None = None

    def __call__(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() and targets is not None:
            return self.train(inputs, targets)
        outputs = self.forward(inputs)
        if targets is None:
            return self._from_last(None if outputs is None else self.whole_outputs(outputs))
        return self._from_last(None if outputs is None else self.loss(outputs, targets))

    @property
    def last_rank(self) -> int:
        """The rank of the group that holds the last stage: of a V, the first one."""
        return 0 if SCHEDULES[self.schedule][1] else self.group.size() - 1

    @property
    def params(self) -> list[nn.Parameter]:
        return list({p: None for part in self.stages.parts for p in part.parameters()})

    # ------------------------------------------------------------ training
    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss over the valid targets of all of them."""
        schedule, first, last = self._schedule(inputs), 0 in self.stages.indices, self._holds_last()
        params, losses = self.params, []
        self.valid = (targets != -100).sum().clamp(min=1) if not targets.is_floating_point() else None
        with _grads_aside(params) as made:
            arguments = (inputs,) if first else ()
            schedule.step(*arguments, target=targets if last else None, losses=losses if last else None, return_outputs=False)
            made.extend(param.grad for param in params)
        loss = torch.stack([part.detach() for part in losses]).mean() if last else None
        return HandOver.apply(self._from_last(loss).requires_grad_(), params, made)

    def _weighted_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's mean loss, weighted so that the mean over micro-batches is that over all valid targets."""
        loss = self.loss(outputs, targets)
        if self.valid is None:
            return loss
        return loss * ((targets != -100).sum() * self.microbatches / self.valid)

    def _schedule(self, inputs: Tensor) -> Any:
        """The schedule for inputs of this shape; torch fixes the shapes that stages exchange at the first step."""
        key = (tuple(inputs.shape), inputs.dtype, torch.is_autocast_enabled(self.device.type))
        if key not in self.prepared:
            stages = [
                PipelineStage(part, index, self.stages.count, self.device, group=self.group)
                for part, index in zip(self.stages.parts, self.stages.indices, strict=True)
            ]
            each, _ = SCHEDULES[self.schedule]
            self.prepared[key] = CLASSES[self.schedule](
                stages if each > 1 else stages[0], n_microbatches=self.microbatches, loss_fn=self._weighted_loss
            )
        return self.prepared[key]

    # ------------------------------------------------------------ evaluation
    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor | None:
        """The outputs, on the ranks of the last stage; any batch size, in as many micro-batches as it gives."""
        chunks = inputs.chunk(min(self.microbatches, len(inputs)))
        outputs: list[Tensor] = []
        works: list[tuple[dist.Work, Tensor]] = []
        for stage, part in zip(self.stages.indices, self.stages.parts, strict=True):
            received = outputs if stage - 1 in self.stages.indices else None  # the turn of a V stays on its rank
            outputs = []
            for i, chunk in enumerate(chunks):
                x = chunk if stage == 0 else received[i] if received is not None else self._receive(stage - 1)
                x = part(x)
                if stage + 1 == self.stages.count or stage + 1 in self.stages.indices:
                    outputs.append(x)
                else:
                    works += self._send(x, stage + 1)
        for work, _ in works:
            work.wait()
        return torch.cat(outputs) if self._holds_last() else None
