"""Attention within documents: what a position of a window that packs several of them may look at.

In two forms: a mask for `scaled_dot_product_attention`, and, on GPUs, the blocks of the mask that FlexAttention
(arXiv:2412.05496) computes while it skips the others, so that its work grows with the documents' lengths and not with
the window's square.

Shapes: B batch, T positions, S positions so far (T without a cache), N = ceil(T / 128) blocks, H query heads,
G key-value heads, K head width. Documents are numbered in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._triton import has_triton

BLOCK = 128  # positions; what FlexAttention's kernels are tuned for


def skips_blocks(device: torch.device, head_dim: int) -> bool:
    """Whether FlexAttention is to be taken: its fast kernels need Triton, a GPU, and heads of at least 16."""
    return device.type == "cuda" and head_dim >= 16 and has_triton()


def dense_mask(document_BT: Tensor, document_BS: Tensor) -> Tensor:
    """Whether position j comes no later than i and belongs to its document, (B, 1, T, S)."""
    new, seen = document_BT.shape[1], document_BS.shape[1]
    before_TS = torch.ones(new, seen, dtype=torch.bool, device=document_BT.device).tril(seen - new)
    return before_TS & (document_BT[:, None, :, None] == document_BS[:, None, None, :])


def block_mask(document_BT: Tensor) -> BlockMask:
    """`dense_mask` without a cache, for FlexAttention.

    What `create_block_mask` would give, found from the first and last document of each block instead of from
    B x T x T numbers: two blocks share a document where the earlier one's last is the later one's first.
    """
    length, device = document_BT.shape[1], document_BT.device
    start_N = torch.arange(0, length, BLOCK, device=device)
    first_BN, last_BN = document_BT[:, start_N], document_BT[:, (start_N + BLOCK - 1).clamp(max=length - 1)]
    earlier_NN = start_N[:, None] > start_N
    shared_BNN = (earlier_NN & (first_BN[:, :, None] == last_BN[:, None, :])) | (start_N[:, None] == start_N)
    complete_N1 = (start_N + BLOCK <= length)[:, None]
    full_BNN = earlier_NN & complete_N1 & (last_BN[:, :, None] == first_BN[:, None, :])
    partial, full = _ordered(shared_BNN & ~full_BNN), _ordered(full_BNN)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document_BT[b, i] == document_BT[b, j])

    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length))


def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: BlockMask) -> Tensor:
    """Attention (B, H, T, K) within what the blocks let through."""
    attention = flex_attention if torch.compiler.is_compiling() else compiled()
    q_BHTK, k_BGTK = q_BHTK.to(v_BGTK.dtype), k_BGTK.to(v_BGTK.dtype)  # autocast normalizes in fp32
    return attention(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1])


@cache
def compiled() -> Callable[..., Tensor]:
    """FlexAttention outside a compiled block, where it would hold all the scores otherwise.

    Wrapped, so that selective recomputation knows what was computed and keeps it.
    """
    from torch._inductor import config

    option = "wrap_inductor_compiled_regions"
    return torch.compile(flex_attention, options={option: True} if hasattr(config, option) else None)


def _ordered(chosen_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of blocks chose, (B, 1, N), and their columns, those first, (B, 1, N, N)."""
    columns = chosen_BNN.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_BNN.sum(-1, dtype=torch.int32)[:, None], columns.int()[:, None]
