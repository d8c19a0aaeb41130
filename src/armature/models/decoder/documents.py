"""Attention within documents, for samples that pack several documents, and within a sliding window
of positions.

There are two forms: a mask for `scaled_dot_product_attention`, and, on GPUs, a block mask for
FlexAttention
(arXiv:2412.05496), which skips empty blocks. Its work grows with the documents' lengths, not with
the window's square.

Shapes: B batch, T positions, S positions including the cache (T without one), N = ceil(T / 128)
blocks, H query heads,
G key-value heads, K head width. Documents are numbered in order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._triton import has_triton

BLOCK = 128  # positions; FlexAttention's kernels are tuned for it


def skips_blocks(device: torch.device, head_dim: int) -> bool:
    """Return whether to use FlexAttention: its fast kernels need Triton, a GPU, and heads of at
    least 16.
    """
    return device.type == "cuda" and head_dim >= 16 and has_triton()


def dense_mask(document_BT: Tensor, document_BS: Tensor, *, window: int | None = None) -> Tensor:
    """Return a mask (B, 1, T, S).

    True if position j is in i's document, not later, and less than `window` earlier.
    """
    near_TS = _near(
        document_BT.shape[1], document_BS.shape[1], window=window, device=document_BT.device
    )
    return near_TS & (document_BT[:, None, :, None] == document_BS[:, None, None, :])


def position_mask(
    new: int, seen: int, *, window: int | None, device: torch.device, head_dim: int
) -> Tensor | BlockMask | None:
    """Return the mask of the newest T = `new` of S = `seen` positions without documents.

    None: `is_causal` says it.
    """
    if (window is None or seen <= window) and new in (1, seen):
        return None
    if window is not None and new == seen and skips_blocks(device, head_dim):
        return block_mask(torch.zeros(1, new, dtype=torch.int32, device=device), window=window)
    return _near(new, seen, window=window, device=device)


def _near(new: int, seen: int, *, window: int | None, device: torch.device) -> Tensor:
    near_TS = torch.ones(new, seen, dtype=torch.bool, device=device).tril(seen - new)
    return near_TS if window is None else near_TS.triu(seen - new - window + 1)


def block_mask(document_BT: Tensor, *, window: int | None = None) -> BlockMask:
    """Return `dense_mask` without a cache as FlexAttention's block mask; one row of documents
    serves any batch.

    The result equals that of `create_block_mask`, but is found from the first and last document of
    each block instead
    of from B x T x T numbers: two blocks share a document if the earlier block's last is the later
    block's first.
    """
    length, device = document_BT.shape[1], document_BT.device
    start_N = torch.arange(0, length, BLOCK, device=device)
    first_BN, last_BN = (
        document_BT[:, start_N],
        document_BT[:, (start_N + BLOCK - 1).clamp(max=length - 1)],
    )
    # the least distance of two positions is BLOCK - 1 less, the largest more
    apart_NN = start_N[:, None] - start_N
    earlier_NN = apart_NN > 0
    near_NN, all_near_NN = earlier_NN, earlier_NN
    if window is not None:
        near_NN, all_near_NN = (
            earlier_NN & (apart_NN < window + BLOCK - 1),
            earlier_NN & (apart_NN <= window - BLOCK),
        )
    shared_BNN = (near_NN & (first_BN[:, :, None] == last_BN[:, None, :])) | (apart_NN == 0)
    complete_N1 = (start_N + BLOCK <= length)[:, None]
    full_BNN = all_near_NN & complete_N1 & (last_BN[:, :, None] == first_BN[:, None, :])
    partial, full = _ordered(shared_BNN & ~full_BNN), _ordered(full_BNN)
    several = document_BT.shape[0] > 1

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if several else 0
        near = (i >= j) if window is None else (i >= j) & (i - j < window)
        return near & (document_BT[row, i] == document_BT[row, j])

    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: BlockMask) -> Tensor:
    """Return attention (B, H, T, K) under the block mask."""
    attention = flex_attention if torch.compiler.is_compiling() else compiled()
    # autocast normalizes queries and keys in fp32
    q_BHTK, k_BGTK = (q_BHTK.to(v_BGTK.dtype), k_BGTK.to(v_BGTK.dtype))
    return attention(
        q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1]
    )


@cache
def compiled() -> Callable[..., Tensor]:
    """Return FlexAttention compiled, for use outside a compiled block: uncompiled, it would hold
    all the scores.

    It is wrapped, so that selective recomputation recognizes its result and keeps it.
    """
    from torch._inductor import config

    option = "wrap_inductor_compiled_regions"
    return torch.compile(
        flex_attention, options={option: True} if hasattr(config, option) else None
    )


def _ordered(chosen_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks per row of blocks (B, 1, N), and column indices, chosen
    first (B, 1, N, N).
    """
    columns = chosen_BNN.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_BNN.sum(-1, dtype=torch.int32)[:, None], columns.int()[:, None]
