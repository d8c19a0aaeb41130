"""Peak memory of one rank, by closed formulas. A test holds them near the simulator.

A step's memory peaks at one of four moments: when the loss is computed, when backward begins with
the last block, when it ends with the first, and in the optimizer's step. What each holds is added
up here by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from armature.planning import activations
from armature.planning.setup import Setup

GIB = 2**30
CONTEXT_BYTES = GIB // 2  # CUDA's context and cuBLAS's workspace
COMMUNICATION_BYTES = GIB  # NCCL's buffers, if there are several ranks
FRAGMENTATION = 0.05  # share of the peak that the caching allocator reserves beyond it
CHUNK = {"cpu": 2**23, "gpu": 2**27}  # logits of one chunk of the loss (models/decoder/loss.py)
# a rank's elements per exchange (parallel/distributed_matrices.py)
MUON_ROUND = {"whole": 2**28, "sharded": 2**26}
LOGIT_BYTES = 12  # without chunks: fp32 log-probabilities, their gradient, and the logits' gradient
# elements reduced or gathered at once, at most: DeepSpeedStrategy's defaults
DEEPSPEED_BUCKET = 200_000_000
# the last weights stay gathered: backward needs them within stage3_max_reuse_distance
DEEPSPEED_KEPT = 500_000_000


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that one rank holds at once.

    Attributes:
        bytes_by_kind: allocated at the peak: parameters, gradients, optimizer state, activations,
            gathered, temporary.
        allowance_bytes: what comes on top: context, communication buffers, fragmentation.
        state_bytes: what rests between steps (parameters, gradients, optimizer state, averages),
            which no smaller micro-batch changes.
        least_bytes: what the optimizer's step takes, with its allowance: no smaller micro-batch and
            no recomputation changes it.
    """

    bytes_by_kind: Mapping[str, float]
    allowance_bytes: float
    state_bytes: float
    least_bytes: float

    @property
    def allocated_bytes(self) -> float:
        return sum(self.bytes_by_kind.values())

    @property
    def total_bytes(self) -> float:
        return self.allocated_bytes + self.allowance_bytes


@dataclass(frozen=True)
class Part:
    """Parameters of one pipeline stage, before sharding: of the ends and of `blocks` blocks.

    A block whose weights are gathered has `gathered`: of a mixture's experts, those of one rank.
    """

    first: float
    blocks: int
    block: float
    last: float
    gathered: float

    @property
    def total(self) -> float:
        return self.first + self.blocks * self.block + self.last


def peak(setup: Setup) -> Peak:
    """Return the peak of the rank that needs most."""
    stages = [_stage_peak(setup, stage) for stage in range(setup.axes["pipe"])]
    kinds, state, _ = max(stages, key=lambda found: sum(found[0].values()))
    least = max(stepping for _, _, stepping in stages)
    allowance, on_top = (
        allowance_bytes(size, ranks=setup.world_size, on_cpu=setup.on_cpu)
        for size in (sum(kinds.values()), least)
    )
    return Peak(
        bytes_by_kind=kinds,
        allowance_bytes=allowance,
        state_bytes=state,
        least_bytes=least + on_top,
    )


def allowance_bytes(allocated: float, *, ranks: int, on_cpu: bool = False) -> float:
    """Return what comes on top of the bytes that are allocated at the peak: context, communication,
    fragmentation.
    """
    fixed = 0 if on_cpu else CONTEXT_BYTES + (COMMUNICATION_BYTES if ranks > 1 else 0)
    return fixed + FRAGMENTATION * allocated


def _stage_peak(setup: Setup, stage: int) -> tuple[dict[str, float], float, float]:
    """Return bytes by kind of one pipeline stage at its highest moment, of what rests, and of the
    optimizer's step.
    """
    part = _part(setup, stage)
    state = _state(setup, part)
    moments = _moments(setup, part, stage, state)
    if setup.kind == "deepspeed" and setup.stage == 3:  # its bucket is never freed
        bucket = setup.compute_bytes * DEEPSPEED_BUCKET
        moments = [{**kinds, "gathered": kinds.get("gathered", 0) + bucket} for kinds in moments]
    highest = max(moments, key=lambda kinds: sum(kinds.values()))
    return (
        {kind: size for kind, size in highest.items() if size},
        sum(state.values()),
        sum(moments[-1].values()),
    )


def _part(setup: Setup, stage: int) -> Part:
    cost, pipe, tensor = setup.cost, setup.axes["pipe"], setup.axes["tensor"]
    blocks, first, last = setup.blocks_by_rank[stage], stage == 0, stage == pipe - 1
    gathered = (
        (cost.block - cost.experts) / tensor + cost.experts / setup.expert if cost.experts else None
    )
    # the tensor axis divides experts too, as ranks of the expert axis or of `rest`
    block = cost.block / tensor
    return Part(
        cost.first / tensor * first, blocks, block, cost.last / tensor * last, gathered or block
    )


def _state(setup: Setup, part: Part) -> dict[str, float]:
    """Return resting bytes of parameters, gradients and optimizer state, and of copies of the
    weights' size.
    """
    state = _weights_and_state(setup, part)
    trained = part.total if setup.adapters is None else part.blocks * setup.adapted
    share = setup.weight_ranks if setup.kind == "mesh" else 1
    separate = setup.separate_buckets and setup.kind == "ddp"
    state["averaged weights"] = 4 * trained / share if setup.averaged and not setup.offload else 0
    state["buckets"] = setup.weight_bytes * trained if separate else 0
    return state


def _weights_and_state(setup: Setup, part: Part) -> dict[str, float]:
    if setup.adapters is not None:
        return _adapted_state(setup, part)
    ends, matrices = part.first + part.last, part.blocks * part.block
    optimizer = matrices * setup.matrix_state + ends * setup.other_state
    optimizer *= setup.weight_bytes / 4 if setup.kind != "deepspeed" else 1
    if setup.kind == "deepspeed":
        return _deepspeed_state(setup, part.total, optimizer)
    share = setup.weight_ranks if setup.kind == "mesh" else 1
    on_device = 0 if setup.offload else 1 / share
    weights = part.total * setup.weight_bytes * on_device
    whole = (setup.axes["tensor"] - 1) * _embedding_bytes(setup, part)
    return {
        "parameters": weights,
        "gradients": weights + whole,
        "optimizer state": optimizer * on_device,
    }


def _embedding_bytes(setup: Setup, part: Part) -> float:
    """Return bytes of the embedding's part if its gradient is whole until the optimizer's step: no
    FSDP, untied.
    """
    whole = activations.is_unsharded(setup) and setup.axes["tensor"] > 1 and not setup.cost.tied
    return setup.weight_bytes * part.first if whole else 0


def _adapted_state(setup: Setup, part: Part) -> dict[str, float]:
    """Return resting bytes if all weights but the adapters are frozen."""
    share = setup.weight_ranks if setup.kind == "mesh" else 1
    on_device = 0 if setup.offload else 1 / share
    trained = part.blocks * setup.adapted * setup.weight_bytes * on_device
    frozen = (
        _held(setup, part, blocks=part.blocks, ends=part.first + part.last, each=setup.weight_bytes)
        * on_device
    )
    state = setup.other_state / 4 * trained
    return {"parameters": frozen + trained, "gradients": trained, "optimizer state": state}


def _held(
    setup: Setup, part: Part, *, blocks: float, ends: float, each: int, gathered: bool = False
) -> float:  # fmt: skip
    """Return bytes of the weights of blocks and of `ends` parameters, if an element has `each`; of
    4 bits less.
    """
    dense = each * (blocks * (part.gathered if gathered else part.block) + ends)
    if setup.matrix_bytes is None:
        return dense
    return (
        dense
        - blocks * (each * setup.cost.block_matrices - setup.matrix_bytes) / setup.axes["tensor"]
    )


def _deepspeed_state(setup: Setup, total: float, optimizer: float) -> dict[str, float]:
    """Return ZeRO's formula (arXiv:1910.02054, 3.1): weights and gradients as computed with, fp32
    masters and state.

    The engine reduces gradients while the last micro-batch's backward runs, in stage 1 only then.
    It copies weights to fp32, also those that are.
    """
    ranks, low = setup.world_size, setup.compute_bytes
    # on a CPU it reduces after backward
    whole = setup.stage == 1 and (setup.accumulate > 1 or setup.on_cpu)
    return {
        "parameters": 0 if setup.offload else low * total / (ranks if setup.stage >= 3 else 1),
        "gradients": 0 if setup.offload_optimizer else low * total / (1 if whole else ranks),
        "optimizer state": 0 if setup.offload_optimizer else (optimizer + 4 * total) / ranks,
    }


# ---------------------------------------------------------------- moments
def _moments(
    setup: Setup, part: Part, stage: int, state: Mapping[str, float]
) -> list[dict[str, float]]:
    cost, c = setup.cost, setup.compute_bytes
    tensor, pipe, context = setup.axes["tensor"], setup.axes["pipe"], setup.axes["context"]
    between = tensor if setup.sequence_parallel else 1
    piece = setup.micro if pipe == 1 else setup.micro / setup.microbatches
    whole = activations.kept_by_blocks(setup, part.blocks) * activations.samples_in_flight(
        setup, stage
    )
    block = piece * activations.kept_by_block(setup, "none")
    # computed again when backward reaches the block
    working = block if setup.recompute != "none" else 0
    gradients = piece * cost.positions / context * c * cost.inner / tensor
    working += gradients / 2  # of about half of them at a time
    copied, low = _low_copies(setup, part)
    held = dict(state)
    stays = (setup.kind == "ddp" and not setup.separate_buckets) or (
        setup.kind == "deepspeed" and setup.stage == 3
    )  # buckets; a flat buffer
    gathered, unit_gradients = _gathered(setup, part)
    # all of the schedule's losses are computed before its backward
    late = setup.schedule.name == "gpipe" and pipe > 1
    if pipe > 1:
        # a schedule's gradients lie beside those before: Lightning's zero_grad comes after
        # training_step
        held["gradients"] *= 2
    if setup.accumulate == 1 and not stays and pipe == 1:
        held["gradients"] = 0  # set to None before the step
    # gradients stay whole until the schedule's last micro-batch
    if pipe > 1 and activations.is_sharded(setup):
        unit_gradients = setup.reduced_bytes * _trained(setup, part)
    working += _dense_matrix(setup)
    after_blocks = activations.norm_bytes(setup) + 2 * c
    end = piece * cost.losses / context * cost.width * after_blocks / between if part.last else 0
    loss, loss_backward = _loss(setup, part, piece)
    last_gathered = _unsharded(setup, _last_unit(setup, part))
    # its buffer; else a gradient is larger
    arriving = 0 if setup.adapters is None else last_gathered
    finish = (
        max(_unit(setup, part.first), _unit(setup, part.gathered)) if setup.adapters is None else 0
    )
    if setup.accumulate > 1:  # added to the one before
        finish = max(finish, tensor * _embedding_bytes(setup, part))
    if pipe > 1:
        pieces = activations.micro_batches_in_flight(setup, stage)
        others = whole * (pieces - 1) / pieces + (block if setup.recompute == "none" else 0)
        if not activations.is_sharded(setup) and setup.adapters is None:
            finish = max(finish, setup.weight_bytes * part.first)
        waiting = (pieces - 1 if late else 0) * _kept_by_loss(setup, part, piece)
        at_loss = {**held, "gradients": state["gradients"] if late else held["gradients"]}
        return [
            {**at_loss, "activations": whole + end + waiting, "16-bit copies": copied,
             "gathered": gathered, "temporary": max(loss, loss_backward) + unit_gradients},
            {**held, "activations": others, "16-bit copies": copied,
             "gathered": gathered, "temporary": working + unit_gradients + finish},
            {**state, "temporary": _optimizer_temporary(setup, part)},
        ]  # fmt: skip
    return [
        {**held, "activations": whole + end, "16-bit copies": copied,
         "gathered": last_gathered + arriving + _ahead(setup, part), "temporary": loss},
        {**held, "activations": whole + end, "16-bit copies": low,
         "gathered": last_gathered + _ahead(setup, part), "temporary": loss_backward},
        {**held, "activations": whole, "16-bit copies": low,
         "gathered": gathered, "temporary": working + unit_gradients},
        {**state, "activations": block if setup.recompute == "none" else 0, "gathered": gathered,
         "temporary": working + finish},
        {**state, "temporary": _optimizer_temporary(setup, part)},
    ]  # fmt: skip


def _low_copies(setup: Setup, part: Part) -> tuple[float, float]:
    """Return bytes of the 16-bit copies of weights that autocast makes of wider ones: in forward,
    and after.

    Backward needs those of blocks that are not recomputed. Autocast keeps the others up to the end
    of forward, except for frozen weights.
    """
    wider = (
        setup.gathered_bytes > setup.compute_bytes
        if activations.is_sharded(setup)
        else setup.kind != "deepspeed"
    )
    autocast = setup.precision.endswith("-mixed") and wider
    if not autocast or setup.matrix_bytes is not None:
        return 0, 0
    cost = setup.cost
    block = 2 * (cost.block_matrices + cost.idle_matrices) / setup.axes["tensor"]
    saved = (part.blocks - activations.recomputed_blocks(setup, part.blocks)) * block
    return (saved if setup.adapters is not None else part.blocks * block), saved


def _dense_matrix(setup: Setup) -> float:
    """Return bytes of the largest matrix of 4 bits while it is made: its fp32 values, and those in
    the compute type.
    """
    if setup.matrix_bytes is None:
        return 0
    largest = max(rows * columns for rows, columns in setup.cost.linears) / setup.axes["tensor"]
    return (4 + (setup.compute_bytes if setup.compute_bytes < 4 else 2)) * largest


def _unsharded(setup: Setup, parameters: float) -> float:
    """Return bytes of a unit's gathered weights."""
    return setup.gathered_bytes * parameters if activations.is_sharded(setup) else 0


def _last_unit(setup: Setup, part: Part) -> float:
    """Return parameters of the unit that is used when the loss is computed."""
    return (part.first if setup.cost.tied else part.last) or part.gathered


def _unit(setup: Setup, parameters: float) -> float:
    """Return bytes of a unit's unsharded gradients and of the buffer in which they are reduced."""
    return (
        (setup.gathered_bytes + setup.reduced_bytes) * parameters
        if activations.is_sharded(setup)
        else 0
    )


def _ahead(setup: Setup, part: Part) -> float:
    """Return bytes of the gathered weights that stay so from forward to backward, beside the last
    unit.
    """
    if not activations.is_sharded(setup) or (setup.kind == "mesh" and setup.reshard):
        return 0
    if setup.kind == "deepspeed":
        return setup.compute_bytes * max(
            0, min(part.total, DEEPSPEED_KEPT) - _last_unit(setup, part)
        )
    ends = part.first + part.last - _last_unit(setup, part)
    return max(
        0,
        _held(setup, part, blocks=part.blocks, ends=ends, each=setup.gathered_bytes, gathered=True),
    )


def _gathered(setup: Setup, part: Part) -> tuple[float, float]:
    """Return bytes of gathered weights while backward runs, and of one unit's gradients on their
    way.
    """
    if setup.kind == "deepspeed" and setup.stage < 3:
        # two overlap, whatever the model
        return (1 if setup.on_cpu else 2) * setup.compute_bytes * DEEPSPEED_BUCKET, 0
    if not activations.is_sharded(setup):
        return 0, 0
    blocks = max(1, round(setup.min_unit / part.block)) if part.block < setup.min_unit else 1
    unit = min(part.blocks, blocks) * part.gathered
    whole = part.blocks if not setup.reshard else 2 * min(part.blocks, blocks)
    ends = part.first + part.last if not setup.reshard else 0
    gathered = _held(setup, part, blocks=whole, ends=ends, each=setup.gathered_bytes, gathered=True)
    trained = unit if setup.adapters is None else min(part.blocks, blocks) * setup.adapted
    return gathered, 2 * _unit(setup, trained)


def _trained(setup: Setup, part: Part) -> float:
    """Return parameters of one stage whose gradients a rank holds unsharded."""
    if setup.adapters is not None:
        return part.blocks * setup.adapted
    return part.first + part.blocks * part.gathered + part.last


def _loss(setup: Setup, part: Part, piece: float) -> tuple[float, float]:
    """Return temporary bytes of the head and the loss, and of their backward."""
    cost, c, tensor = setup.cost, setup.compute_bytes, setup.axes["tensor"]
    if not part.last:
        return 0, 0
    positions, matrix = piece * cost.losses / setup.axes["context"], cost.head_matrices / tensor
    logits = positions * cost.classes / tensor
    # as `Runner` computes it
    of_outputs = setup.schedule.stages_per_rank > 1 or setup.axes["context"] > 1
    if not cost.chunked_loss or (setup.axes["pipe"] > 1 and of_outputs):
        return (8 + c) * logits, LOGIT_BYTES * logits + c * matrix
    chunk = min(logits, CHUNK["cpu" if setup.on_cpu else "gpu"])
    # of the weight
    copy = (
        0 if c == 4 or (activations.is_sharded(setup) and setup.gathered_bytes == c) else c * matrix
    )
    if setup.adapters is not None:  # the head has no gradient
        return (c + 4) * chunk + copy + positions * cost.width * c, 3 * positions * cost.width * c
    workspace = (c + 4) * chunk + (4 + c) * matrix + copy + positions * cost.width * c
    return workspace, (8 + c) * matrix + 3 * positions * cost.width * c


def _kept_by_loss(setup: Setup, part: Part, piece: float) -> float:
    """Return bytes that a chunked loss keeps until its backward: the head's gradient and copy, and
    the input's.
    """
    if not part.last:
        return 0
    matrix = setup.cost.head_matrices / setup.axes["tensor"] if setup.adapters is None else 0
    positions = piece * setup.cost.losses
    return (4 + setup.compute_bytes) * matrix + positions * setup.cost.width * setup.compute_bytes


def _optimizer_temporary(setup: Setup, part: Part) -> float:
    """Return bytes of an optimizer's step: Muon orthogonalizes a few matrices at a time, fused Adam
    needs none.

    Several ranks exchange the updates of many matrices together.

    DeepSpeed copies a rank's gradients to fp32.
    """
    if setup.kind == "deepspeed":
        return (
            4 * part.total / setup.world_size
            if setup.compute_bytes < 4 and not setup.offload_optimizer
            else 0
        )
    if setup.adapters is not None:
        return 0
    muon = 0
    if setup.matrix_state != setup.other_state:
        sharded = setup.kind == "mesh"
        held = part.blocks * part.block / (setup.weight_ranks if sharded else 1)
        exchanged = (
            min(held, MUON_ROUND["sharded" if sharded else "whole"]) if setup.world_size > 1 else 0
        )
        muon = setup.compute_bytes * (6 * part.block + 3 * exchanged)
    return max(muon, _embedding_bytes(setup, part))
