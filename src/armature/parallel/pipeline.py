"""The pipeline axis: a model split into stages, and a schedule that runs when the model is called
with targets.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from armature.errors import ConfigError
from armature.models.plan import Plan
from armature.parallel import process_group
from armature.parallel.gradients import local_part, local_parts, multiply
from armature.parallel.split import (
    Schedule,
    balance_blocks,
    stage_ownership_problems,
    stages_of_rank,
)
from armature.parallel.targets import count, weigh

SCHEDULE_CLASSES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}
# torch's names of actions
FORWARD = ("F", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD")


@dataclass
class Stages:
    """The stages that this rank holds."""

    indices: list[int]  # among the stages of all ranks
    count: int  # of the stages of all ranks
    # for each of this rank's stages, a view of the model with only its blocks and ends
    parts: list[nn.Module]


def split(
    model: nn.Module,
    plan: Plan,
    *,
    rank: int,
    ranks: int,
    schedule: Schedule,
    block_counts: list[int] | None = None,
) -> Stages:
    """Delete what this rank does not hold from the model, and make a view of the model for each of
    its stages.

    Names never change: the names of deleted blocks are missing, and an end that this rank does not
    hold is None.
    Without `block_counts`, stages are balanced by parameter count (`blocks_of_stages`), including
    the ends.
    """
    if problems := stage_ownership_problems(model):
        raise ConfigError(problems)
    blocks: nn.ModuleDict = model.get_submodule(plan.blocks)  # pyright: ignore[reportAssignmentType]
    count = ranks * schedule.stages_per_rank
    of_stages = blocks_of_stages(model, plan, count=count, block_counts=block_counts)
    held = {i: of_stages[i] for i in stages_of_rank(rank, ranks=ranks, schedule=schedule)}
    for name in {*blocks}.difference(*held.values()):
        del blocks[name]
    for ends, stage in ((plan.first, 0), (plan.last, count - 1)):
        if stage not in held:
            for end in ends:
                setattr(model, end, None)
    parts = [
        _stage_view(model, plan, names=held[i], first=i == 0, last=i == count - 1) for i in held
    ]
    return Stages(indices=list(held), count=count, parts=parts)


def blocks_of_stages(
    model: nn.Module, plan: Plan, *, count: int, block_counts: list[int] | None = None
) -> list[list[str]]:
    """Return the names of each stage's blocks, balanced by parameter count unless `block_counts`
    says how many.

    `used_share` is the share of a module's parameters that a token uses (1 without it). The
    embedding counts in full.
    """
    blocks: nn.ModuleDict = model.get_submodule(plan.blocks)  # pyright: ignore[reportAssignmentType]

    def cost(module: nn.Module | None) -> int:
        parts = [*module.modules()] if module is not None else []
        shares: dict[Any, Any] = {
            p: part.used_share
            for part in parts
            if hasattr(part, "used_share")
            for p in part.parameters()
        }
        params = {p: None for part in parts for p in part.parameters()}
        return round(sum(p.numel() * shares.get(p, 1) for p in params))

    sizes = block_counts or balance_blocks(
        [cost(block) for block in blocks.values()],
        stages=count,
        first=sum(cost(getattr(model, end)) for end in plan.first),
        last=sum(cost(getattr(model, end)) for end in plan.last),
    )
    names = iter(blocks)
    return [[*islice(names, size)] for size in sizes]


def _stage_view(
    model: nn.Module, plan: Plan, *, names: list[str], first: bool, last: bool
) -> nn.Module:
    """Return a copy of the model with only the named blocks.

    It shares their parameters, but has hooks of its own.
    """
    view = copy.copy(model)
    for name, value in view.__dict__.items():
        if isinstance(value, dict) and name not in ("_parameters", "_buffers"):
            view.__dict__[name] = copy.copy(value)  # hooks and submodules
    blocks: nn.ModuleDict = model.get_submodule(plan.blocks)  # pyright: ignore[reportAssignmentType]
    setattr(view, plan.blocks, nn.ModuleDict({name: blocks[name] for name in names}))
    for ends, held in ((plan.first, first), (plan.last, last)):
        for end in () if held else ends:
            setattr(view, end, None)
    return view


@dataclass
class Runner:
    """Runs this rank's stages.

    A call with inputs and targets returns the loss, one with inputs alone the outputs.
    """

    model: nn.Module
    stages: Stages
    group: dist.ProcessGroup
    device: torch.device
    schedule: Schedule
    microbatches: int
    # all-gathers the last stage's outputs if the tensor axis shards them
    unshard_outputs: Callable[[Tensor], Tensor]
    data_ranks: int = 1
    # returns fp16's factor of the loss, 0-dim, or None
    loss_scale: Callable[[], Tensor | None] = lambda: None
    # torch's, by whether they only evaluate, and the inputs' shape and dtype
    schedules: dict[Any, Any] = field(default_factory=dict)
    step_scale: Tensor | None = None  # this step's `loss_scale`

    def __call__(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        for part in self.stages.parts:
            part.training = self.model.training
        if torch.is_grad_enabled():
            if targets is None:
                raise RuntimeError(
                    "A pipeline trains only through a call with targets. Got model(inputs): write "
                    "loss = model(inputs, targets) in training_step."
                )
            return self.train(inputs, targets)
        outputs = self.evaluate(inputs)
        if targets is not None:
            loss = None if outputs is None else self.model.loss(outputs, targets)  # pyright: ignore[reportCallIssue]
            return self._broadcast_from_last(loss, scalar=True)
        outputs = None if outputs is None else self.unshard_outputs(outputs)
        return self._broadcast_from_last(outputs, scalar=False)

    @property
    def holds_last(self) -> bool:
        return self.stages.count - 1 in self.stages.indices

    @property
    def forward_takes_targets(self) -> bool:
        """Whether the last stage's forward returns the loss: the model can compute it without
        holding all the outputs.

        Only if a rank has one stage, since torch calls all of a rank's stages with the same
        arguments.
        """
        alone = self.stages.indices == [self.stages.count - 1]
        return alone and getattr(self.model, "computes_loss_in_forward", False)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, and return the mean loss over their valid
        targets, 0-dim.

        Gradients are computed of the loss multiplied by the number of targets, and with fp16 by
        `loss_scale`, since they pass through fp16 here.
        """
        schedule, is_new = self._schedule(inputs, self._weighted_loss)
        losses: list[Tensor] = []
        params = list({param: None for part in self.stages.parts for param in part.parameters()})
        self.step_scale, target_count = self.loss_scale(), count(targets)
        # of a mixture's tokens: torch finds shapes with a first pass of its own
        limit: Any = getattr(self.model, "counted_passes", None) if is_new else None
        with (
            _without_gradients(params),
            nullcontext() if limit is None else limit(self.microbatches),
        ):
            schedule.step(
                *((inputs,) if 0 in self.stages.indices else ()),
                target=targets if self.holds_last else None,
                losses=losses if self.holds_last else None,
                return_outputs=False,
                **({"targets": targets} if self.forward_takes_targets else {}),
            )
            grads = [param.grad for param in params]
        mean = torch.stack([loss.detach() for loss in losses]).mean() if losses else None
        loss = self._broadcast_from_last(mean, scalar=True)
        factors = [factor for factor in (target_count, self.step_scale) if factor is not None]
        factor = torch.stack(factors).prod() if factors else None
        if factor is not None:
            loss = loss / factor
        return ScheduledLoss.apply(loss.requires_grad_(), params, grads, factor)  # pyright: ignore[reportReturnType]

    def _weighted_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's loss, multiplied so that the mean over micro-batches is the mean
        over valid targets times their number.
        """
        loss = outputs if self.forward_takes_targets else self.model.loss(outputs, targets)  # pyright: ignore[reportCallIssue]
        loss = loss if self.step_scale is None else loss * self.step_scale
        number = count(targets)
        return loss if number is None else weigh(loss, number * self.microbatches)

    def _schedule(self, inputs: Tensor, loss: Callable[..., Tensor] | None) -> tuple[Any, bool]:
        """Return torch's schedule for inputs of this shape, and whether it is new: then its first
        step finds the shapes that stages exchange, with a pass of its own.

        That pass gathers sharded weights, so all data ranks run it together. They agree on it in
        the CPU's memory, so that nobody waits for a GPU.
        """
        key = (loss is None, inputs.shape, inputs.dtype)
        is_new = key not in self.schedules
        if self.data_ranks > 1:
            is_new = process_group.all_max(int(is_new)) == [1]
        if is_new:
            stages = [
                pipelining.PipelineStage(
                    part, index, self.stages.count, self.device, group=self.group
                )
                for part, index in zip(self.stages.parts, self.stages.indices, strict=True)
            ]
            self.schedules[key] = schedule = SCHEDULE_CLASSES[self.schedule.name](
                stages if self.schedule.stages_per_rank > 1 else stages[0],
                n_microbatches=self.microbatches, loss_fn=loss,
            )  # fmt: skip
            if loss is None and self.schedule.v_shaped:
                # torch would ask the two stages at the V's tip for gradients
                order = schedule.pipeline_order_with_comms
                for rank, actions in order.items():
                    order[rank] = [a for a in actions if a.computation_type in FORWARD]
        return self.schedules[key], is_new

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs on the ranks of the last stage, None on others.

        Every batch is filled with its last sample to `microbatches` equal chunks: each chunk
        gathers sharded weights, so data ranks whose batches have other sizes must compute as many.
        """
        missing = -len(inputs) % self.microbatches
        chunks = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])])
        schedule, _ = self._schedule(chunks, None)
        outputs = schedule.step(*((chunks,) if 0 in self.stages.indices else ()))
        return outputs[: len(inputs)] if self.holds_last else None

    def _broadcast_from_last(self, value: Tensor | None, *, scalar: bool) -> Tensor:
        """Return the last stage's value (None elsewhere) on all stages, in fp32.

        A scalar's shape is not sent.
        """
        # a V's last stage is the first rank's
        source, shape = 0 if self.schedule.v_shaped else self.group.size() - 1, ()
        if not scalar:
            box: list[Any] = [tuple(value.shape) if value is not None else None]
            dist.broadcast_object_list(box, group=self.group, group_src=source, device=self.device)
            shape = box[0]
        value = torch.empty(shape, device=self.device) if value is None else value
        value = value.float().contiguous()  # the default type is not fp32 under bf16-true
        dist.broadcast(value, group=self.group, group_src=source)
        return value


class ScheduledLoss(torch.autograd.Function):
    """The loss of one step of the schedule, whose backward adds the gradients that the schedule
    computed.

    Lightning calls zero_grad between training_step and backward, but a schedule computes gradients
    inside training_step. They are removed from the parameters there, and added in backward, so that
    accumulation, the division of the loss and clipping need no special case.

    `grads` are those of the loss multiplied by `factor` (0-dim; None: 1).
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        params: list[Tensor],
        grads: list[Tensor | None],
        factor: Tensor | None,
    ) -> Tensor:
        ctx.pairs = [
            (param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None
        ]
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None, None]:
        (scale,) = grad_outputs
        scale = scale if ctx.factor is None else scale / ctx.factor
        multiply(local_parts(grad for _, grad in ctx.pairs), by=scale)
        for param, grad in ctx.pairs:
            if param.grad is None:
                param.grad = grad
            else:
                local_part(param.grad).add_(local_part(grad))
        return None, None, None, None


@contextmanager
def _without_gradients(params: list[nn.Parameter]) -> Iterator[None]:
    """Remove the parameters' gradients inside the context, and restore the previous ones at its
    end.
    """
    previous = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, previous, strict=True):
            param.grad = grad
