"""What a model costs, as numbers: written next to the model as `cost.py`, read by
`armature.planning`. Torch-free.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Sizes of a model of equal blocks. Elements and FLOPs are per position of a sample.

    Attributes:
        first, block, last: parameters before the blocks, of one block, and after the blocks. A
            matrix that the ends share counts in `first` alone.
        tied: whether first and last share a matrix.
        positions: of one sample, between the blocks.
        width: elements of the residual stream.
        norms: in one block, each over `width`, of which each keeps `norm_bytes` per element.
        shared_inputs: elements that a block's column-sharded matrices take and keep; a tensor axis
            gathers them.
        inner: other elements that a block keeps for backward; a tensor axis divides them.
        products: elements that `selective` recomputation keeps: results of matrix products and
            attention. `outputs` of them are sums over the tensor axis, of which a rank keeps its
            positions.
        block_matrices, head_matrices: parameters of matrices, which make the FLOPs.
        attention: elements of all query heads of one block, times the share of positions that each
            attends to (sliding windows).
        classes: logits of each position that has a loss; `losses` of those positions in a sample.
        chunked_loss: whether the loss is computed in chunks of positions.
        unit: what throughput counts: tokens or samples.
        keys, key_heads: elements of keys and values together, and their heads, if attention takes a
            context axis.
        queries: elements of the queries, if it does.
        experts: parameters of one block's experts (`models/mixture`), which an expert axis spreads
            over ranks.
        idle_matrices: parameters of one block's matrices that a position does not use: those of
            other experts.
        rows: elements per position that travel to the position's experts, and as many back, with an
            expert axis.
        linears: (out, in) of each Linear of a block, if all its matrices are Linears and may have
            adapters.
    """

    first: int
    block: int
    last: int
    blocks: int
    tied: bool
    positions: int
    width: int
    norms: int
    norm_bytes: int
    shared_inputs: int
    inner: int
    products: int
    outputs: int
    block_matrices: int
    head_matrices: int
    attention: float
    classes: int
    losses: int
    chunked_loss: bool
    unit: str
    queries: int = 0
    keys: int = 0
    key_heads: int = 0
    experts: int = 0
    idle_matrices: int = 0
    rows: int = 0
    linears: tuple[tuple[int, int], ...] = ()

    @property
    def parameters(self) -> int:
        return self.first + self.blocks * self.block + self.last

    @property
    def units_per_sample(self) -> int:
        """Tokens of a sample, or 1 if the unit is the sample."""
        return self.positions if self.unit == "tokens" else 1

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward of one sample, by PaLM's convention (arXiv:2204.02311,
        appendix B).
        """
        blocks = (
            self.blocks
            * (6 * self.block_matrices + 12 * self.attention * self.positions)
            * self.positions
        )
        return float(blocks + 6 * self.head_matrices * self.losses)
