"""The pipeline axis: a model split into stages, and a schedule that runs when the model is called
with targets.

What a schedule computes inside training_step is handed to backward: `scheduled_loss.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from armature.errors import ConfigError
from armature.models.loss import IGNORED
from armature.models.plan import Plan
from armature.parallel import process_group, randomness
from armature.parallel.context import Positions
from armature.parallel.scheduled_loss import ScheduledLoss, without_gradients
from armature.parallel.split import (
    Schedule,
    balance_blocks,
    evaluation_slot,
    stage_ownership_problems,
    stages_of_rank,
)
from armature.parallel.targets import TARGETS_PER_UNIT, TargetWeights, weigh

SCHEDULE_CLASSES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}
HEADER_BYTES = 256


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
    names, count = list(blocks), ranks * schedule.stages_per_rank
    of_stages = blocks_of_stages(model, plan, count=count, block_counts=block_counts)
    held = {i: of_stages[i] for i in stages_of_rank(rank, ranks=ranks, schedule=schedule)}
    for name in names:
        if not any(name in of_stage for of_stage in held.values()):
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
    view._modules[plan.blocks] = nn.ModuleDict({name: blocks[name] for name in names})
    for ends, held in ((plan.first, first), (plan.last, last)):
        if not held:
            view._modules |= dict.fromkeys(ends, None)
    return view


@dataclass
class Message:
    """A stage's output on its way to the rank of the next stage."""

    stage: int  # which receives it
    inputs: torch.Size  # shape of the micro-batch that it was computed from
    content: Tensor | None = None  # None: not yet received

    @property
    def key(self) -> tuple[int, torch.Size]:
        return self.stage, self.inputs


def encode_shape(tensor: Tensor) -> Tensor:
    """Return a tensor's shape and dtype as (HEADER_BYTES,) of uint8, for a rank that has to
    allocate it.
    """
    text = " ".join([str(tensor.dtype).removeprefix("torch."), *map(str, tensor.shape)])
    return torch.frombuffer(bytearray(text.encode().ljust(HEADER_BYTES)), dtype=torch.uint8)


def decode_shape(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    dtype, *shape = bytes(header.tolist()).decode().split()
    return torch.Size(map(int, shape)), getattr(torch, dtype)


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
    positions: Positions | None = None  # this rank's on the context axis
    data_ranks: int = 1
    # None: each batch's loss is the mean over its own targets
    target_weights: TargetWeights | None = None
    # returns fp16's factor of the loss, 0-dim, or None
    loss_scale: Callable[[], Tensor | None] = lambda: None
    # torch's, by the inputs' shape and dtype
    schedules: dict[Any, Any] = field(default_factory=dict)
    # shape and dtype of what a stage receives, by (stage, shape of the micro-batch)
    activation_shapes: dict[Any, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    step_scale: Tensor | None = None  # this step's `loss_scale`
    # number of targets that divides a micro-batch's summed loss, 0-dim
    # None: the targets are no classes, and the mean over micro-batches is the loss
    loss_divisor: Tensor | None = None

    def __call__(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        for part in self.stages.parts:
            part.training = self.model.training
        if torch.is_grad_enabled():
            if targets is None:
                raise RuntimeError(
                    "A pipeline trains only through a call with targets. Got model(inputs): write "
                    "loss = model(inputs, targets) in training_step."
                )
            with (
                nullcontext()
                if self.positions is None
                else randomness.own_draws(self.positions.rank)
            ):
                return self.train(inputs, targets)
        outputs = self.evaluate(inputs)
        if targets is not None:
            loss = None if outputs is None else self._loss(outputs, targets)
            return self._mean(self._broadcast_from_last(loss, scalar=True))
        outputs = None if outputs is None else self.unshard_outputs(outputs)
        outputs = self._broadcast_from_last(outputs, scalar=False)
        return outputs if self.positions is None else self.positions.whole(outputs)

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of outputs of this rank's positions, whose mean over the context axis is
        that of all.
        """
        if self.positions is None:
            return self.model.loss(outputs, targets)  # pyright: ignore[reportCallIssue]
        loss = self.model.loss(outputs, self.positions.part(targets))  # pyright: ignore[reportCallIssue]
        share = self.positions.share(targets)
        return weigh(loss, share)

    def _mean(self, loss: Tensor) -> Tensor:
        return loss if self.positions is None else self.positions.mean(loss)

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
        alone = self.stages.indices == [self.stages.count - 1] and self.positions is None
        return alone and getattr(self.model, "computes_loss_in_forward", False)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, and return the mean loss over their valid
        targets, 0-dim.

        If `target_weights` counts targets, gradients are computed of the loss multiplied by their
        number, and with fp16 by `loss_scale`, since they pass through fp16 here.
        """
        is_new = self._is_new(inputs)
        schedule, losses = self._schedule(inputs, is_new=is_new), []
        params = list({param: None for part in self.stages.parts for param in part.parameters()})
        target_count = None if self.target_weights is None else self.target_weights.batch_targets
        self.step_scale = self.loss_scale()
        if target_count is not None:
            self.loss_divisor = torch.full_like(target_count, TARGETS_PER_UNIT)
        elif targets.is_floating_point():
            self.loss_divisor = None
        else:
            self.loss_divisor = (targets != IGNORED).sum().clamp(min=1)
        if self.positions is not None:
            targets = self.positions.part(targets)
        # of a mixture's tokens: torch finds shapes with a first pass of its own
        limit: Any = getattr(self.model, "counted_passes", None) if is_new else None
        with (
            without_gradients(params),
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
        loss = self._mean(self._broadcast_from_last(mean, scalar=True))
        factors = [factor for factor in (target_count, self.step_scale) if factor is not None]
        factor = torch.stack(factors).prod() if factors else None
        if factor is not None:
            loss = loss / factor
        return ScheduledLoss.apply(loss.requires_grad_(), params, grads, factor)  # pyright: ignore[reportReturnType]

    def _weighted_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's loss, weighted so that the mean over micro-batches is the mean
        over valid targets.

        With a context axis these are targets of this rank's positions, and the mean is also over
        the axis.
        """
        loss = outputs if self.forward_takes_targets else self.model.loss(outputs, targets)  # pyright: ignore[reportCallIssue]
        loss = loss if self.step_scale is None else loss * self.step_scale
        if self.loss_divisor is None:
            return loss
        pieces = self.microbatches * (1 if self.positions is None else self.positions.size)
        return weigh(loss, (targets != IGNORED).sum() * pieces / self.loss_divisor)

    def _is_new(self, inputs: Tensor) -> bool:
        """Return whether torch has to find the shapes that stages exchange, on this rank or on
        another data rank.

        It finds them with a first pass, which gathers sharded weights: all ranks that shard them
        must run it. The
        answer travels in the CPU's memory, so that nobody waits for a GPU.
        """
        is_new = (inputs.shape, inputs.dtype) not in self.schedules
        return process_group.all_max(int(is_new)) == [1] if self.data_ranks > 1 else is_new

    def _schedule(self, inputs: Tensor, *, is_new: bool) -> Any:
        """Return the schedule for inputs of this shape: the first step fixes the shapes that stages
        exchange.
        """
        key = (inputs.shape, inputs.dtype)
        if is_new:
            stages = [
                pipelining.PipelineStage(
                    part, index, self.stages.count, self.device, group=self.group
                )
                for part, index in zip(self.stages.parts, self.stages.indices, strict=True)
            ]
            self.schedules[key] = SCHEDULE_CLASSES[self.schedule.name](
                stages if self.schedule.stages_per_rank > 1 else stages[0],
                n_microbatches=self.microbatches, loss_fn=self._weighted_loss,
            )  # fmt: skip
        return self.schedules[key]

    @torch.no_grad()
    def evaluate(self, inputs: Tensor) -> Tensor | None:
        """Return the outputs on the ranks of the last stage, None on others.

        Every batch has `microbatches` equal chunks, filled with its last sample: each chunk gathers
        sharded weights, so
        data ranks whose batches have other sizes must compute as many.

        Every output is sent between the slot in which it is computed and the next one, and a rank
        starts all that it sends and receives there together. NCCL works through a rank's operations
        in order, and a send waits for its
        receive: ranks that start them in different orders would wait for each other forever.
        """
        missing = -len(inputs) % self.microbatches
        chunks = torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])]).chunk(
            self.microbatches
        )
        parts = dict(zip(self.stages.indices, self.stages.parts, strict=True))
        slot_of = partial(evaluation_slot, ranks=self.group.size(), schedule=self.schedule)
        units = {slot_of(stage, i): (stage, i) for stage in parts for i in range(len(chunks))}
        ready = {(0, i): chunk for i, chunk in enumerate(chunks)}  # inputs by stage and micro-batch
        outputs: list[Tensor] = []
        for slot in range(min(units) - 1, max(units) + 1):
            sent = received = None
            if slot in units:
                stage, i = units[slot]
                y = parts[stage](ready.pop((stage, i)))
                if stage == self.stages.count - 1:
                    outputs.append(y)
                elif stage + 1 in parts:
                    ready[stage + 1, i] = y
                else:
                    sent = Message(stage + 1, chunks[i].shape, y.contiguous())
            stage, i = units.get(slot + 1, (0, 0))
            if stage > 0 and stage - 1 not in parts:
                received = Message(stage, chunks[i].shape)
            self._exchange_known(sent, received)
            if received is not None and received.content is not None:
                ready[stage, i] = received.content
        return torch.cat(outputs)[: len(inputs)] if self.holds_last else None

    def _exchange_known(self, sent: Message | None, received: Message | None) -> None:
        """Send one message and receive another.

        Their shape and dtype go first if the inputs' shape is new.
        """
        shapes = self.activation_shapes
        new_sent, new_received = (
            None if message is None or message.key in shapes else message
            for message in (sent, received)
        )
        if new_sent is not None and new_sent.content is not None:
            shapes[new_sent.key] = new_sent.content.shape, new_sent.content.dtype
            new_sent = Message(
                new_sent.stage, new_sent.inputs, encode_shape(new_sent.content).to(self.device)
            )
        if new_received is not None:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.device)
            new_received = Message(new_received.stage, new_received.inputs, header)
        self._exchange(new_sent, new_received)
        if new_received is not None and new_received.content is not None:
            shapes[new_received.key] = decode_shape(new_received.content)
        if received is not None:
            shape, dtype = shapes[received.key]
            received.content = torch.empty(shape, dtype=dtype, device=self.device)
        self._exchange(sent, received)

    def _exchange(self, sent: Message | None, received: Message | None) -> None:
        operations = [
            dist.P2POp(
                function, message.content, self._rank_of(message.stage - back), group=self.group
            )
            for function, message, back in ((dist.isend, sent, 0), (dist.irecv, received, 1))
            if message is not None and message.content is not None
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def _rank_of(self, stage: int) -> int:
        ranks = self.group.size()
        holder = next(
            r
            for r in range(ranks)
            if stage in stages_of_rank(r, ranks=ranks, schedule=self.schedule)
        )
        return dist.get_global_rank(self.group, holder)

    def _broadcast_from_last(self, value: Tensor | None, *, scalar: bool) -> Tensor:
        """Return the last stage's value (None elsewhere) on all stages, in fp32.

        A scalar's shape is not sent.
        """
        source, shape = self._rank_of(self.stages.count - 1), ()
        if not scalar:
            box: list[Any] = [tuple(value.shape) if value is not None else None]
            dist.broadcast_object_list(box, src=source, group=self.group, device=self.device)
            shape = box[0]
        value = torch.empty(shape, device=self.device) if value is None else value
        value = value.float().contiguous()  # the default type is not fp32 under bf16-true
        dist.broadcast(value, src=source, group=self.group)
        return value


def install_runner(model: nn.Module, runner: Runner) -> None:
    """Let a call of the model run its pipeline.

    The class is swapped, since a wrapper would prefix parameter names.
    """
    base = type(model)

    def call(self: nn.Module, *args: Any) -> Tensor:
        return self.__dict__["_runner"](*args)

    model.__dict__["_runner"] = runner
    model.__class__ = type(
        base.__name__, (base,), {"__call__": call, "__module__": base.__module__}
    )
