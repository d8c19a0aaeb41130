"""What a forward pass keeps for backward, by closed formulas: the part of `memory.py` that grows
with the batch.
"""

from __future__ import annotations

from armature.parallel.split import pieces_in_flight
from armature.planning.setup import Setup


def kept_by_block(setup: Setup, recompute: str | int) -> float:
    """Return bytes that one block keeps of one sample's forward pass for backward."""
    cost, c, tensor = setup.cost, setup.compute_bytes, setup.axes["tensor"]
    # ranks that share the positions between blocks
    between = tensor if setup.sequence_parallel else 1
    positions, copied = cost.positions / setup.axes["context"], cost.keys * (setup.key_copies - 1)
    if recompute == "none":
        norms = cost.norms * norm_bytes(setup) * cost.width / between
        adapters = 0 if setup.adapters is None else setup.adapters.rank * len(cost.linears)
        dropped = 0  # each adapter's own input after dropout, and its mask
        if setup.adapters is not None and setup.adapters.dropout:
            dropped = (c + 1) * sum(columns for _, columns in cost.linears)
        inner = c * (cost.inner + copied) / tensor
        return positions * (norms + c * cost.shared_inputs + c * adapters + inner + dropped)
    stream = residual_bytes(setup) * cost.width / between
    if recompute == "selective":
        products = (cost.products - cost.outputs) / tensor + cost.outputs
        if setup.adapters is not None:  # each Linear has two more products
            rows = sum(rows for rows, _ in cost.linears)
            products += (
                (rows - cost.outputs) / tensor
                + cost.outputs
                + setup.adapters.rank * len(cost.linears)
            )
        if setup.axes["context"] > 1:  # what the exchanges bring is kept, too
            products += (2 * cost.queries + cost.keys + copied) / tensor
        if setup.expert > 1:  # so are the rows that arrive and return
            products += 2 * cost.rows / tensor
        return positions * (stream + c * products)
    return positions * stream


def norm_bytes(setup: Setup) -> float:
    """Return bytes that a norm keeps per element.

    A frozen one keeps its input, and not what its weight multiplies.
    """
    return setup.cost.norm_bytes / (1 if setup.adapters is None else 2)


def residual_bytes(setup: Setup) -> int:
    """Return bytes of an element of the residual stream: of the embedding's output."""
    return (
        setup.gathered_bytes
        if is_sharded(setup) or setup.kind == "deepspeed"
        else setup.weight_bytes
    )


def recomputed_blocks(setup: Setup, blocks: int) -> int:
    """Return how many of so many blocks are computed again in backward."""
    if setup.recompute == "none":
        return 0
    return -(-blocks // int(setup.recompute)) if str(setup.recompute).isdigit() else blocks


def kept_by_blocks(setup: Setup, blocks: int) -> float:
    """Return bytes that the blocks keep of one sample."""
    recomputed = recomputed_blocks(setup, blocks)
    how = "every" if str(setup.recompute).isdigit() else setup.recompute
    return recomputed * kept_by_block(setup, how) + (blocks - recomputed) * kept_by_block(
        setup, "none"
    )


def samples_in_flight(setup: Setup, stage: int) -> float:
    """Return samples whose activations a stage holds at once."""
    pipe = setup.axes["pipe"]
    if pipe == 1:
        return setup.micro
    piece = setup.micro / setup.microbatches
    return piece * micro_batches_in_flight(setup, stage)


def micro_batches_in_flight(setup: Setup, rank: int) -> float:
    return pieces_in_flight(
        setup.schedule, rank=rank, ranks=setup.axes["pipe"], microbatches=setup.microbatches
    )


def is_unsharded(setup: Setup) -> bool:
    return setup.kind == "mesh" and setup.data_ranks * setup.axes["context"] == 1


def is_sharded(setup: Setup) -> bool:
    mesh = setup.kind == "mesh" and not is_unsharded(setup)
    return mesh or (setup.kind == "deepspeed" and setup.stage == 3)
