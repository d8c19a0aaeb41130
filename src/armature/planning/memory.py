"""Peak memory of one rank, by a closed formula. A test holds it within a tenth of the simulator.

A step's memory peaks at one of five moments: in the loss, in its backward, when backward begins
with the last block, when it ends with the first, and in the optimizer's step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from armature.planning.setup import Setup

GIB = 2**30
CONTEXT_BYTES = GIB // 2  # CUDA's context and cuBLAS's workspace
COMMUNICATION_BYTES = GIB  # NCCL's buffers, if there are several ranks
FRAGMENTATION = 0.05  # share of the peak that the caching allocator reserves beyond it
CHUNK = {"cpu": 2**23, "gpu": 2**27}  # logits of one chunk of the loss (models/decoder/loss.py)
HALF_KEPT = 0.6  # of what `selective` keeps: every second product, and attention
LOGIT_BYTES = 12  # without chunks: fp32 log-probabilities, their gradient, and the logits' gradient
MUON_ROUND = 2**28  # a rank's elements per exchange (parallel/distributed_matrices.py), at most
# of DeepSpeed's defaults: elements that are reduced or gathered at once (strategies/deepspeed.py
# takes no more than the model has), and that stay gathered from forward to backward
DEEPSPEED_BUCKET, DEEPSPEED_KEPT = 200_000_000, 500_000_000


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that one rank holds at once.

    Attributes:
        bytes_by_kind: allocated at the peak: parameters, gradients, optimizer state, activations,
            gathered, temporary.
        allowance_bytes: what comes on top: context, communication buffers, fragmentation.
        least_bytes: what the optimizer's step takes, with its allowance: no smaller micro-batch and
            no recomputation changes it.
    """

    bytes_by_kind: Mapping[str, float]
    allowance_bytes: float
    least_bytes: float

    @property
    def allocated_bytes(self) -> float:
        return _size(self.bytes_by_kind)

    @property
    def total_bytes(self) -> float:
        return self.allocated_bytes + self.allowance_bytes


def peak(setup: Setup) -> Peak:
    """Return the peak of the rank that needs most."""
    stages = [_moments(setup, stage) for stage in range(setup.axes["pipe"])]
    highest = max(chain(*stages), key=_size)
    least = max(_size(moments[-1]) for moments in stages)
    over = {"ranks": setup.world_size, "on_cpu": setup.on_cpu}
    return Peak(
        bytes_by_kind={kind: each for kind, each in highest.items() if each},
        allowance_bytes=allowance_bytes(_size(highest), **over),
        least_bytes=least + allowance_bytes(least, **over),
    )


def _size(kinds: Mapping[str, float]) -> float:
    return sum(kinds.values())


def allowance_bytes(allocated: float, *, ranks: int, on_cpu: bool = False) -> float:
    """Return what comes on top of the bytes that are allocated at the peak: context, communication,
    fragmentation.
    """
    fixed = 0 if on_cpu else CONTEXT_BYTES + (COMMUNICATION_BYTES if ranks > 1 else 0)
    return fixed + FRAGMENTATION * allocated


def _moments(setup: Setup, stage: int) -> list[dict[str, float]]:
    """Return bytes by kind on a rank of one pipeline stage at each moment of a step."""
    cost, c, pipe = setup.cost, setup.compute_bytes, setup.axes["pipe"]
    tensor, sharded, adapted = setup.axes["tensor"], setup.sharded, setup.adapter_rank > 0
    blocks = setup.blocks_by_rank[stage]
    first = cost.first / tensor * (stage == 0)
    last = cost.last / tensor * (stage == pipe - 1)
    trained = blocks * setup.adapted if adapted else first + last + blocks * cost.block / tensor
    state = _state(setup, first + last, blocks, trained)
    # weights: units of blocks are gathered, and their gradients whole until they are reduced
    unit = min(blocks, max(1, round(setup.min_unit * tensor / cost.block)))
    gathered_block = setup.block_bytes(setup.gathered_bytes, gathered=True)
    elements = setup.adapted if adapted else setup.block_elements(gathered=True)
    both = setup.gathered_bytes + setup.reduced_bytes
    last_unit = setup.gathered_bytes * (first if cost.tied else last) or gathered_block
    last_unit *= sharded
    gathered, ahead, unit_gradients = 0.0, 0.0, 0.0
    if sharded:
        gathered, unit_gradients = 2 * unit * gathered_block, 2 * unit * both * elements
        if not setup.reshard:
            gathered = blocks * gathered_block + setup.gathered_bytes * (first + last)
            ahead = max(0.0, gathered - last_unit)
    if setup.kind == "deepspeed":
        bucket = min(cost.parameters, DEEPSPEED_BUCKET)
        gathered += 2 * c * bucket
        kept = min(first + last + blocks * cost.block / tensor, DEEPSPEED_KEPT)
        ahead = c * (2 * bucket + kept * sharded)
    ended = dict(state)  # when backward ends
    if pipe > 1:
        # Lightning's zero_grad comes after the schedule, so its gradients lie beside those before;
        # they stay unsharded until its last micro-batch
        ended["gradients"] *= 2
        ends = 0.0 if adapted else first + last
        unit_gradients = setup.reduced_bytes * (ends + blocks * elements) * sharded
        ahead = max(ahead, gathered + unit_gradients - last_unit)
    # activations
    pieces = min(pipe - stage, setup.microbatches) if pipe > 1 else 1
    piece = setup.micro / (setup.microbatches if pipe > 1 else 1)
    kept = pieces * piece * _kept_by_blocks(setup, blocks)
    block = piece * kept_by_block(setup, "none")
    working = block if setup.recompute != "none" else 0.0
    # about half of a block's gradients at a time
    inner = piece * cost.positions * c * cost.inner
    working += inner / (2 * tensor * setup.axes["context"]) + _dense_matrix(setup)
    finish = 0.0 if adapted else both * max(first, unit * elements) * sharded
    loss, loss_backward, end = _loss(setup, piece) if last else (0.0, 0.0, 0.0)
    copied, saved = _low_copies(setup, blocks)
    carried = dict(ended)
    stays = setup.kind == "ddp" or (setup.kind == "deepspeed" and setup.stage == 3)
    if setup.accumulate == 1 and pipe == 1 and not stays:
        carried["gradients"] = 0  # set to None before the step
    one_block = block if setup.recompute == "none" else 0.0
    return [
        {**carried, "activations": kept + end, "16-bit copies": copied,
         "gathered": last_unit * (1 + adapted) + ahead, "temporary": loss},
        {**carried, "activations": kept + end, "16-bit copies": saved,
         "gathered": last_unit + ahead, "temporary": loss_backward},
        {**carried, "activations": kept, "16-bit copies": saved,
         "gathered": gathered, "temporary": working + unit_gradients},
        {**ended, "activations": one_block, "gathered": gathered, "temporary": working + finish},
        {**state, "temporary": _stepping(setup, blocks, trained)},
    ]  # fmt: skip


def _state(setup: Setup, ends: float, blocks: int, trained: float) -> dict[str, float]:
    """Return resting bytes by kind.

    ZeRO's formula is of arXiv:1910.02054, section 3.1: weights and gradients as computed with, fp32
    masters and state. Its stage 1 keeps whole gradients if it accumulates them.
    """
    cost, tensor, each = setup.cost, setup.axes["tensor"], setup.weight_bytes
    share = 1 / setup.weight_ranks
    optimizer = setup.other_state * trained
    if not setup.adapter_rank:
        optimizer += (setup.matrix_state - setup.other_state) * blocks * cost.block / tensor
    if setup.kind == "deepspeed":
        low, on_device = setup.compute_bytes * trained, 0 if setup.offload_optimizer else 1
        whole = setup.stage == 1 and (setup.accumulate > 1 or setup.on_cpu)
        return {
            "parameters": 0 if setup.offload else low * (share if setup.stage == 3 else 1),
            "gradients": on_device * low * (1 if whole else share),
            "optimizer state": on_device * (optimizer + 4 * trained) * share,
        }
    own = 0 if setup.offload else share
    weights = blocks * setup.block_bytes(each) + each * ends
    return {
        "parameters": own * (weights + each * trained * (setup.adapter_rank > 0)),
        "gradients": own * each * trained,
        "optimizer state": own * optimizer * each / 4,
        "averaged weights": 4 * own * trained * setup.averaged,
    }


def kept_by_block(setup: Setup, recompute: str | int) -> float:
    """Return bytes that one block keeps of one sample's forward pass for backward."""
    cost, c, tensor = setup.cost, setup.compute_bytes, setup.axes["tensor"]
    # ranks that share the positions between blocks
    between = tensor if setup.sequence_parallel else 1
    positions, rank = cost.positions / setup.axes["context"], setup.adapter_rank
    hidden = rank * len(cost.linears)
    if recompute == "none":
        # a frozen norm keeps its input, and not what its weight multiplies
        norms = cost.norms * cost.norm_bytes / (2 if rank else 1) * cost.width / between
        others = cost.keys * (setup.axes["context"] - 1) * setup.gathers_keys  # of other ranks
        inner = (cost.inner + others) / tensor
        return positions * (norms + c * (cost.shared_inputs + hidden + inner))
    stream = setup.residual_bytes * cost.width / between
    if recompute not in ("selective", "half"):
        return positions * stream
    products = (cost.products - cost.outputs) / tensor + cost.outputs
    if rank:  # each Linear has two more products
        rows = sum(rows for rows, _ in cost.linears)
        products += (rows - cost.outputs) / tensor + cost.outputs + hidden
    if setup.expert > 1:  # the rows that arrive and return are kept, too
        products += 2 * cost.rows / tensor
    if recompute == "half":
        products *= HALF_KEPT
    return positions * (stream + c * products)


def recomputed_blocks(setup: Setup, blocks: int) -> int:
    """Return how many of so many blocks are computed again in backward."""
    if setup.recompute == "none":
        return 0
    return -(-blocks // int(setup.recompute)) if str(setup.recompute).isdigit() else blocks


def _kept_by_blocks(setup: Setup, blocks: int) -> float:
    again = recomputed_blocks(setup, blocks)
    others = (blocks - again) * kept_by_block(setup, "none")
    return again * kept_by_block(setup, setup.recompute) + others


def _dense_matrix(setup: Setup) -> float:
    """Return bytes of the largest matrix of 4 bits while it is made: its fp32 values, and those in
    the compute type.
    """
    if not setup.in_4_bits:
        return 0
    largest = max(rows * columns for rows, columns in setup.cost.linears)
    return (4 + setup.compute_bytes) * largest / setup.axes["tensor"]


def _low_copies(setup: Setup, blocks: int) -> tuple[float, float]:
    """Return bytes of the 16-bit copies of weights that autocast makes of wider ones: in forward,
    and after.

    Backward needs those of blocks that are not recomputed. Autocast keeps the others up to the end
    of forward, except for frozen weights.
    """
    wider = setup.gathered_bytes > 2 if setup.sharded else setup.kind != "deepspeed"
    if not setup.precision.endswith("-mixed") or not wider or setup.in_4_bits:
        return 0, 0
    matrices = setup.cost.block_matrices + setup.cost.idle_matrices
    block = 2 * matrices / setup.axes["tensor"]
    saved = (blocks - recomputed_blocks(setup, blocks)) * block
    return (saved if setup.adapter_rank else blocks * block), saved


def _loss(setup: Setup, piece: float) -> tuple[float, float, float]:
    """Return temporary bytes of the head and the loss, of their backward, and what is kept between
    the blocks and the loss.
    """
    cost, c, tensor = setup.cost, setup.compute_bytes, setup.axes["tensor"]
    positions = piece * cost.losses / setup.axes["context"]
    matrix, inputs = cost.head_matrices / tensor, positions * cost.width
    norm = cost.norm_bytes / (2 if setup.adapter_rank else 1)
    end = inputs * (norm + 2 * c) / (tensor if setup.sequence_parallel else 1)
    logits = positions * cost.classes / tensor
    if not cost.chunked_loss or (setup.axes["context"] > 1 and setup.axes["pipe"] > 1):
        return (8 + c) * logits, LOGIT_BYTES * logits + c * matrix, end
    chunk = (c + 4) * min(logits, CHUNK["cpu" if setup.on_cpu else "gpu"])
    # of the weight, which is gathered in the products' type already
    copy = 0 if c == 4 or (setup.sharded and setup.gathered_bytes == c) else c * matrix
    if setup.adapter_rank:  # the head has no gradient
        return chunk + copy + c * inputs, 3 * c * inputs, end
    forward = chunk + copy + (4 + c) * matrix + c * inputs
    return forward, (8 + c) * matrix + 3 * c * inputs, end


def _stepping(setup: Setup, blocks: int, trained: float) -> float:
    """Return temporary bytes of an optimizer's step: Muon orthogonalizes a few matrices at a time
    and exchanges many together, DeepSpeed copies gradients to fp32, fused Adam needs none.
    """
    if setup.kind == "deepspeed":
        wide = setup.compute_bytes == 4 or setup.offload_optimizer
        return 0 if wide else 4 * trained / setup.world_size
    if setup.matrix_state == setup.other_state or setup.adapter_rank:
        return 0
    block = setup.cost.block / setup.axes["tensor"]
    largest = MUON_ROUND // 4 if setup.kind == "mesh" else MUON_ROUND
    exchanged = min(blocks * block / setup.weight_ranks, largest) if setup.world_size > 1 else 0
    return setup.compute_bytes * (6 * block + 3 * exchanged)
