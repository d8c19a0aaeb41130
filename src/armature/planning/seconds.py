"""Seconds of a training step by a roofline, with all communication hidden behind arithmetic, and
with none.

The rates are the simulator's, and the memory traffic of a block is fitted to it (docs/predicting.md
says how far to trust the result).
"""

from __future__ import annotations

from dataclasses import dataclass

from armature.parallel import split
from armature.planning import activations, memory
from armature.planning.devices import MATRIX_SHARE, MEMORY_SHARE, Device
from armature.planning.setup import Setup

HOST_BYTES_PER_SECOND = 20e9  # between a device and its host's memory: PCIe 4.0 x16, shared
# of weights, gradients and state that a CPU's optimizer reads and writes, per rank
HOST_STEP_BYTES_PER_SECOND = 10e9
# memory traffic of operators without arithmetic, in bytes per byte that a block keeps
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 5.4, 10.7
LOGIT_TRAFFIC = 60  # bytes per logit, forward and backward
OPTIMIZER_TRAFFIC = 32  # bytes per parameter of a rank
DEQUANTIZE_TRAFFIC = 32  # bytes per element of 4 bits whenever it is used


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """One optimizer step of the rank that has most to do.

    Attributes:
        compute: without waiting for others; communication: if nothing else runs at the same time.
        bubble_share: share of the step in which a pipeline's schedule leaves the rank idle.
        units: tokens or samples of the whole run's step.
    """

    compute: float
    communication: float
    bubble_share: float
    units: int

    @property
    def hidden(self) -> float:
        """The step with all communication hidden: the least it can take."""
        return self._range[0]

    @property
    def exposed(self) -> float:
        """The step with no communication hidden."""
        return self._range[1]

    @property
    def _range(self) -> tuple[float, float]:
        return split.step_seconds(self.compute, self.communication, bubble_share=self.bubble_share)

    @property
    def units_per_second(self) -> tuple[float, float]:
        """Throughput of the whole run, from least to most."""
        return self.units / self.exposed, self.units / self.hidden


def step_seconds(setup: Setup, device: Device) -> Seconds:
    """Return the seconds of one optimizer step."""
    pipe = setup.axes["pipe"]
    bubble = (
        split.bubble_share(setup.schedule, ranks=pipe, microbatches=setup.microbatches)
        if pipe > 1
        else 0.0
    )
    sent, offloaded = _communication(setup, device), _offload(setup)
    return Seconds(
        compute=_compute(setup, device) + offloaded, communication=sent, bubble_share=bubble,
        units=setup.global_batch_size * setup.cost.units_per_sample,
    )  # fmt: skip


def peak_flops(setup: Setup, device: Device) -> float:
    """Return the FLOP/s of matrix products; a type that the device lacks runs in the next larger
    one.
    """
    if setup.compute_bytes > 2:
        return device.peak("tf32" if setup.compute_bytes == 4 else "float64")
    return device.peak("bfloat16" if "bf16" in setup.precision else "float16")


def _compute(setup: Setup, device: Device) -> float:
    cost, tensor, pipe = setup.cost, setup.axes["tensor"], setup.axes["pipe"]
    flops_rate, bytes_rate = (
        peak_flops(setup, device) * MATRIX_SHARE,
        device.memory_bytes_per_second * MEMORY_SHARE,
    )
    samples = setup.micro * setup.accumulate
    tokens, blocks = samples * cost.positions / setup.axes["context"], setup.blocks_by_rank
    # a block, forward: a multiplication and an addition for each weight, and twice for each pair of
    # positions
    products = tokens * 2 * cost.block_matrices / tensor / flops_rate
    attention = tokens * 4 * cost.attention * cost.positions / tensor / flops_rate
    kept = samples * activations.kept_by_block(setup, "none") / bytes_rate
    forward = products + attention + FORWARD_TRAFFIC * kept + _dequantized(setup, bytes_rate)
    # inputs and weights; frozen weights have no gradients
    towards = 2 if setup.adapters is None else 1
    backward = (
        towards * products
        + 2.5 * attention
        + BACKWARD_TRAFFIC * kept
        + _dequantized(setup, bytes_rate)
    )
    again = {"none": 0.0, "selective": FORWARD_TRAFFIC * kept, "every": forward}
    recomputed = (
        again[setup.recompute] if setup.recompute in again else forward / int(setup.recompute)
    )
    losses = samples * cost.losses / setup.axes["context"]
    head = 2 * (1 + towards) * losses * cost.head_matrices / tensor / flops_rate
    head += LOGIT_TRAFFIC * losses * cost.classes / tensor / bytes_rate
    ranks = (
        setup.weight_ranks
        if setup.kind == "mesh"
        else setup.world_size
        if setup.kind == "deepspeed"
        else 1
    )
    local = setup.trained / (ranks * tensor * pipe)
    step = (
        0.0 if setup.offload or setup.offload_optimizer else OPTIMIZER_TRAFFIC * local / bytes_rate
    )
    block = forward + backward + recomputed
    return max(max(blocks) * block, blocks[-1] * block + head) + step


def _dequantized(setup: Setup, bytes_rate: float) -> float:
    """Return seconds in which one block's matrices of 4 bits are made ready for the micro-batches
    of a step.
    """
    if setup.matrix_bytes is None:
        return 0.0
    return (
        setup.accumulate
        * DEQUANTIZE_TRAFFIC
        * setup.cost.block_matrices
        / setup.axes["tensor"]
        / bytes_rate
    )


def _offload(setup: Setup) -> float:
    """Return seconds of copies between device and host, and of the host's optimizer step."""
    if not (setup.offload or setup.offload_optimizer):
        return 0.0
    ranks = setup.weight_ranks if setup.kind == "mesh" else setup.world_size
    local = setup.cost.parameters / (ranks * setup.axes["tensor"] * setup.axes["pipe"])
    copied = (
        (setup.weight_bytes + setup.compute_bytes)
        * local
        * (2 * setup.accumulate if setup.offload else 1)
    )
    stepped = OPTIMIZER_TRAFFIC * local
    return copied / HOST_BYTES_PER_SECOND + stepped / HOST_STEP_BYTES_PER_SECOND


# ---------------------------------------------------------------- communication
def _communication(setup: Setup, device: Device) -> float:
    """Return seconds of all collectives of a step, each as a ring over its slowest link."""
    axes, divided = setup.axes, setup.axes["tensor"] * setup.axes["pipe"]
    total, trained = setup.cost.parameters / divided, setup.trained / divided
    low, micro_steps = setup.compute_bytes * total, setup.accumulate
    if setup.kind == "ddp":
        return _ring(2 * setup.weight_bytes * trained, setup.world_size, 1, device)
    if setup.kind == "deepspeed":
        kept = setup.compute_bytes * min(total, memory.DEEPSPEED_KEPT)
        gathered = micro_steps * (2 * low - kept) if setup.stage == 3 else low
        all_reduced = 1 if setup.stage == 3 else 2  # below stage 3 the engine does not scatter
        reductions = all_reduced * (micro_steps if setup.stage >= 2 else 1)
        return _ring(gathered + reductions * low, setup.world_size, 1, device)
    if setup.kind != "mesh":
        return 0.0
    stride = axes["tensor"]
    seconds = _weights(setup, device)
    replicated = 2 * setup.reduced_bytes * trained / setup.weight_ranks * micro_steps
    seconds += _ring(replicated, axes["replicate"], stride * setup.weight_ranks, device)
    others = (
        _context(setup, device)
        + _experts(setup, device)
        + _tensor(setup, device)
        + _pipeline(setup, device)
    )
    return seconds + others


def _weights(setup: Setup, device: Device) -> float:
    """Return seconds in which weights are gathered and gradients scattered: with an expert axis,
    the rank's experts.
    """
    cost, axes, steps = setup.cost, setup.axes, setup.accumulate
    low, reduced = setup.gathered_bytes, setup.reduced_bytes
    gathers = steps * (2 if setup.reshard else 1)
    experts = cost.blocks * cost.experts if setup.expert > 1 else 0
    others = cost.parameters - experts
    last = 0  # the last unit's weights stay gathered until backward
    if setup.reshard and axes["pipe"] == 1:
        last = cost.first if cost.tied else cost.last
    packed = (
        0.0
        if setup.matrix_bytes is None
        else cost.blocks * (low * cost.block_matrices - setup.matrix_bytes)
    )
    size = (
        gathers * (low * others - packed)
        - steps * low * last
        + steps * reduced * min(others, setup.trained)
    ) / (axes["tensor"] * axes["pipe"])
    seconds = _ring(size, setup.weight_ranks, axes["tensor"], device)
    own = (gathers * low + steps * reduced) * experts / (setup.expert * axes["pipe"])
    return seconds + _ring(
        own, setup.weight_ranks * axes["tensor"] // setup.expert, setup.expert, device
    )


def _experts(setup: Setup, device: Device) -> float:
    """Return seconds of the exchanges of tokens with their experts: there and back, forward and
    backward.
    """
    if setup.expert == 1:
        return 0.0
    cost, shared = setup.cost, setup.axes["context"] * setup.axes["tensor"]
    exchanges = 2 * (3 if setup.recompute == "every" else 2)
    size = (
        setup.micro * setup.accumulate * cost.positions / shared * cost.rows * setup.compute_bytes
    )
    return _ring(exchanges * max(setup.blocks_by_rank) * size, setup.expert, 1, device)


def _context(setup: Setup, device: Device) -> float:
    """Return seconds of the exchanges around attention: queries, keys, values and results, forward
    and backward.
    """
    cost, context, tensor = setup.cost, setup.axes["context"], setup.axes["tensor"]
    passes = 3 if setup.recompute == "every" else 2
    elements = (2 * cost.queries + cost.keys * setup.key_copies) / tensor
    size = (
        setup.micro * setup.accumulate * cost.positions / context * elements * setup.compute_bytes
    )
    return _ring(passes * max(setup.blocks_by_rank) * size, context, tensor, device)


def _tensor(setup: Setup, device: Device) -> float:
    """Return seconds of the activations' gathers and scattered sums: two of each per block in
    forward and in backward.

    Backward repeats a recomputed block's gathers, and all but the last of its sums; selective
    recomputation keeps sums. Without sequence parallelism an all-reduce takes the place of a sum
    and the next gather.
    """
    cost, sequence = setup.cost, setup.sequence_parallel
    repeated = {"none": 0, "selective": 2 if sequence else 0}.get(
        str(setup.recompute), 3 if sequence else 2
    )
    blocks = max(setup.blocks_by_rank)
    if str(setup.recompute).isdigit():
        repeated *= activations.recomputed_blocks(setup, blocks) / blocks
    elements = setup.micro * setup.accumulate * cost.positions / setup.axes["context"] * cost.width
    # head; embedding, both forward and backward
    ends = 2 * (setup.compute_bytes + activations.residual_bytes(setup))
    return _ring(
        ((8 + repeated) * blocks * setup.compute_bytes + ends) * elements,
        setup.axes["tensor"],
        1,
        device,
    )


def _pipeline(setup: Setup, device: Device) -> float:
    """Return seconds in which a stage sends its results, and the gradients of its inputs."""
    pipe = setup.axes["pipe"]
    if pipe == 1:
        return 0.0
    sent = 2 * setup.schedule.stages_per_rank
    if pipe == 2:  # neither rank has a neighbor on both sides
        sent -= 2 if setup.schedule.v_shaped else 1
    shared = (setup.axes["tensor"] if setup.sequence_parallel else 1) * setup.axes["context"]
    elements = setup.micro * setup.accumulate * setup.cost.positions * setup.cost.width / shared
    return (
        sent
        * elements
        * activations.residual_bytes(setup)
        / _rate(2, setup.world_size // pipe, device)
    )


def _ring(size: float, ranks: int, stride: int, device: Device) -> float:
    """Return seconds in which a ring of ranks gathers or reduces `size` bytes; an all-reduce is two
    of them.
    """
    return size * (ranks - 1) / ranks / _rate(ranks, stride, device) if ranks > 1 else 0.0


def _rate(ranks: int, stride: int, device: Device) -> float:
    """Return bytes per second of one rank: its link, or its part of its machine's network."""
    return device.link_rate(
        ranks=ranks, here=max(1, min(ranks, device.devices_per_machine // stride))
    )
