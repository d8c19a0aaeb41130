"""Seconds of a training step by a roofline, with all communication hidden behind arithmetic, and
with none.

The rates are the simulator's, and the memory traffic of a block is fitted to it (docs/predicting.md
says how far to trust the result).
"""

from dataclasses import dataclass

from armature.parallel import split
from armature.planning import memory
from armature.planning.devices import MATRIX_SHARE, MEMORY_SHARE, Device
from armature.planning.roofline import Roofline
from armature.planning.setup import SCHEDULE, Setup

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
        units_per_second: tokens or samples of the whole run, with no communication hidden and with
            all.
    """

    compute: float
    communication: float
    units_per_second: tuple[float, float]


def step_seconds(setup: Setup, device: Device) -> Seconds:
    """Return the seconds of one optimizer step."""
    ranks = setup.axes["pipe"]
    schedule = split.SCHEDULES[SCHEDULE]
    bubble = split.bubble_share(schedule, ranks=ranks, microbatches=setup.microbatches)
    compute, sent = _compute(setup, device), _communication(setup, device)
    hidden, exposed = hidden_and_exposed(compute, sent, bubble_share=bubble)
    units = setup.global_batch_size * setup.cost.units_per_sample
    rate = (units / exposed, units / hidden)
    return Seconds(compute=compute, communication=sent, units_per_second=rate)


def hidden_and_exposed(
    compute: float, communication: float, *, bubble_share: float
) -> tuple[float, float]:
    """Return seconds of a step with all communication hidden behind computation, and with none.

    What is not hidden makes a micro-batch's slot longer, and the idle slots with it.
    """
    busy = 1 - bubble_share
    return max(compute / busy, communication), (compute + communication) / busy


def compute_type(precision: str) -> str:
    """Return the type of the matrix products, as torch names it."""
    if precision.startswith(("32", "64")):
        return f"float{precision[:2]}"
    return "bfloat16" if "bf16" in precision else "float16"


def _compute(setup: Setup, device: Device) -> float:
    cost, tensor, adapted = setup.cost, setup.axes["tensor"], setup.adapter_rank > 0
    flops_rate = Roofline(device=device).peak(compute_type(setup.precision)) * MATRIX_SHARE
    bytes_rate = device.memory_bytes_per_second * MEMORY_SHARE
    samples = setup.micro * setup.accumulate
    positions = samples * cost.positions / setup.axes["context"]
    # a block, forward: a multiplication and an addition for each weight, and twice for each pair of
    # positions
    products = positions * 2 * cost.block_matrices / tensor / flops_rate
    attention = positions * 4 * cost.attention * cost.positions / tensor / flops_rate
    traffic = samples * memory.kept_by_block(setup, "none") / bytes_rate
    packed = cost.block_matrices / tensor * setup.in_4_bits
    unpacked = setup.accumulate * DEQUANTIZE_TRAFFIC * packed / bytes_rate
    forward = products + attention + FORWARD_TRAFFIC * traffic + unpacked
    # towards inputs and weights; frozen weights have no gradients
    towards = 1 if adapted else 2
    backward = towards * products + 2.5 * attention + BACKWARD_TRAFFIC * traffic + unpacked
    again = {"none": 0.0, "selective": FORWARD_TRAFFIC * traffic, "every": forward}
    again["half"] = again["selective"] + products / 2
    recomputed = again.get(str(setup.recompute))
    if recomputed is None:
        recomputed = forward / int(setup.recompute)
    losses = samples * cost.losses / setup.axes["context"]
    head = 2 * (1 + towards) * losses * cost.head_matrices / tensor / flops_rate
    head += LOGIT_TRAFFIC * losses * cost.classes / tensor / bytes_rate
    block, blocks = forward + backward + recomputed, setup.blocks_by_rank
    busy = max(max(blocks) * block, blocks[-1] * block + head)
    local = setup.trained / (setup.weight_ranks * tensor * setup.axes["pipe"])
    if not setup.offloads:
        return busy + OPTIMIZER_TRAFFIC * local / bytes_rate
    # copies between device and host, and the host's step
    copied = (setup.weight_bytes + setup.compute_bytes) * local
    copied *= 2 * setup.accumulate if setup.offload else 1
    stepped = OPTIMIZER_TRAFFIC * local / HOST_STEP_BYTES_PER_SECOND
    return busy + copied / HOST_BYTES_PER_SECOND + stepped


# ---------------------------------------------------------------- communication
def _communication(setup: Setup, device: Device) -> float:
    """Return seconds of all collectives of a step, each as a ring over its slowest link; an
    all-reduce is two gathers.
    """
    axes, cost, low = setup.axes, setup.cost, setup.compute_bytes
    roofline, everyone = Roofline(device=device), range(setup.world_size)
    if setup.kind == "ddp":
        size = setup.weight_bytes * setup.trained
        return roofline.collective("all_reduce", size, everyone)
    if setup.kind == "deepspeed":
        return roofline.collective("all_gather", _of_zero(setup), everyone)
    if setup.kind != "mesh":
        return 0.0
    pipe, tensor, context, expert = axes["pipe"], axes["tensor"], axes["context"], setup.expert
    blocks, weights = max(setup.blocks_by_rank), setup.weight_ranks
    positions = setup.micro * setup.accumulate * cost.positions / context
    passes = 3 if setup.recompute == "every" else 2  # forward, backward, and forward again
    experts = cost.blocks * cost.experts if expert > 1 else 0
    own = setup.accumulate * experts / (expert * pipe)
    own *= setup.gathered_bytes * (2 if setup.reshard else 1) + setup.reduced_bytes
    reduced = setup.accumulate * setup.reduced_bytes * setup.trained / (tensor * pipe * weights)
    exchanged = (2 * cost.queries + cost.keys) / tensor * low
    if setup.gathers_keys:
        exchanged = context * cost.keys / tensor * low
    rings = [  # bytes, ranks, distance between neighbors
        (_of_weights(setup, experts), weights, tensor),
        (own, max(1, weights * tensor // expert), expert),
        (2 * reduced, axes["replicate"], tensor * weights),
        # around attention: queries, keys, values and results; or all keys and values
        (passes * blocks * positions * exchanged, context, tensor),
        # tokens to their experts and back
        (2 * passes * blocks * positions / tensor * cost.rows * low, expert, 1),
        (_of_tensor_axis(setup, blocks) * positions, tensor, 1),
    ]
    seconds = sum(
        roofline.collective("all_gather", size, range(0, ranks * stride, stride))
        for size, ranks, stride in rings
    )
    if pipe > 1:  # a stage's results, and the gradients of its inputs; at the ends one of them
        shared = tensor if setup.sequence_parallel else 1
        size = (1 if pipe == 2 else 2) * positions * cost.width * setup.residual_bytes / shared
        seconds += roofline.collective("send", size, (0, setup.world_size // pipe))
    return seconds


def _of_zero(setup: Setup) -> float:
    low, steps = setup.compute_bytes * setup.cost.parameters, setup.accumulate
    kept = min(low, setup.compute_bytes * memory.DEEPSPEED_KEPT)
    if setup.stage == 3:
        return steps * (3 * low - kept)
    # below stage 3 the engine reduces to all instead of scattering
    return low + 2 * low * (steps if setup.stage == 2 else 1)


def _of_weights(setup: Setup, experts: int) -> float:
    """Return bytes of gathered weights and scattered gradients, without those of experts that an
    expert axis spreads.
    """
    cost, low = setup.cost, setup.gathered_bytes
    others = cost.parameters - experts
    packed = cost.blocks * (low * cost.block_matrices - setup.packed_bytes) * setup.in_4_bits
    size = (2 if setup.reshard else 1) * (low * others - packed)
    if setup.reshard and setup.axes["pipe"] == 1:  # the last unit stays gathered until backward
        size -= low * (cost.first if cost.tied else cost.last)
    size += setup.reduced_bytes * min(others, setup.trained)
    return setup.accumulate * size / (setup.axes["tensor"] * setup.axes["pipe"])


def _of_tensor_axis(setup: Setup, blocks: int) -> float:
    """Return bytes per position of the activations' gathers and scattered sums: two of each per
    block in forward and in backward.

    Backward repeats a recomputed block's gathers, and all but the last of its sums; selective
    recomputation keeps sums. Without sequence parallelism an all-reduce takes the place of a sum
    and the next gather.
    """
    sequence = setup.sequence_parallel
    kept = setup.recompute in ("selective", "half")
    repeated = (2 if sequence else 0) if kept else (3 if sequence else 2)
    again = memory.recomputed_blocks(setup, blocks)
    # head; embedding, both forward and backward
    ends = 2 * (setup.compute_bytes + setup.residual_bytes)
    return setup.cost.width * (setup.compute_bytes * (8 * blocks + repeated * again) + ends)
