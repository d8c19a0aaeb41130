"""Attention within documents, for samples that pack several documents, and within a sliding window
of positions.

There are two forms: a mask for `scaled_dot_product_attention`, and, on GPUs, a block mask for
FlexAttention (arXiv:2412.05496), which skips empty blocks. Its work grows with the documents'
lengths, not with the window's square.

Shapes: B batch, T positions, S positions including the cache (T without one), H query heads, G
key-value heads, K head width. Documents are numbered in order.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def skips_blocks(device: torch.device, head_dim: int) -> bool:
    """Return whether to use FlexAttention: its fast kernels need Triton, a GPU that it knows, and
    heads of at least 16.
    """
    if device.type != "cuda" or head_dim < 16 or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 0)


def dense_mask(document_BT: Tensor, document_BS: Tensor, *, window: int | None) -> Tensor:
    """Return a mask (B, 1, T, S).

    True if position j is in i's document, not later, and less than `window` earlier.
    """
    near_TS = _near(
        document_BT.shape[1], document_BS.shape[1], window=window, device=document_BT.device
    )
    return near_TS & (document_BT[:, None, :, None] == document_BS[:, None, None, :])


def position_mask(
    new: int, seen: int, *, window: int | None, device: torch.device, head_dim: int, cached: bool
) -> Tensor | BlockMask | None:
    """Return the mask of the newest T = `new` of S = `seen` positions without documents.

    None: `is_causal` says it.
    """
    if (window is None or seen <= window) and new in (1, seen):
        return None
    if (new == seen or not cached) and skips_blocks(device, head_dim):
        document_1S = torch.zeros(1, seen, dtype=torch.int32, device=device)
        return block_mask(document_1S, start=seen - new, window=window)
    return _near(new, seen, window=window, device=device)


def _near(new: int, seen: int, *, window: int | None, device: torch.device) -> Tensor:
    near_TS = torch.ones(new, seen, dtype=torch.bool, device=device).tril(seen - new)
    return near_TS if window is None else near_TS.triu(seen - new - window + 1)


def block_mask(document_BS: Tensor, *, start: int = 0, window: int | None) -> BlockMask:
    """Return `dense_mask` without a cache as FlexAttention's block mask, of the positions from
    `start`; one row of documents serves any batch.
    """
    rows, length = document_BS.shape

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if rows > 1 else 0
        near = (i >= j) if window is None else (i >= j) & (i - j < window)
        return near & (document_BS[row, i] == document_BS[row, j])

    return _blocks(visible, rows, start, length, device=document_BS.device)


def rows(mask: Tensor | BlockMask, start: int, end: int) -> Tensor | BlockMask:
    """Return what a causal mask shows positions from `start` to `end`: of none after them."""
    if not isinstance(mask, BlockMask):
        return mask[..., start:end, :end]
    return _blocks(mask.mask_mod, mask.shape[0], start, end, device=mask.kv_indices.device)


def _blocks(
    visible: Callable[..., Tensor], rows: int, start: int, end: int, *, device: torch.device
) -> BlockMask:
    def moved(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return visible(b, h, i + start, j)

    # compiled, it does not hold B x T x T numbers
    make = _compiled_mask() if device.type == "cuda" else create_block_mask
    return make(moved, rows if rows > 1 else None, None, end - start, end, device=device)


@cache
def _compiled_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask)


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
