"""Recomputation and compilation of a model's blocks. Both change a block's `forward` in place: no name changes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# what costs more to recompute than to keep: matrix products, attention, and what was communicated
EXPENSIVE = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu", "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_reduce",
)  # fmt: skip


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(op).rpartition(".")[0] in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(blocks: Iterable[nn.Module], *, mode: str | int) -> None:
    """Keep less of the forward pass and compute it again in backward.

    Args:
        mode: `none`; `every` block; a number n for every n-th block; `selective`, which keeps the results of matrix
            products, attention and communication, and recomputes the rest of every block.
    """
    if mode == "none":
        return
    step = 1 if mode in ("every", "selective") else int(mode)
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for i, block in enumerate(blocks):
        if i % step == 0:
            block.forward = partial(checkpoint, block.forward, **options)


def compile_forward(modules: Iterable[nn.Module]) -> None:
    """Compile each module's forward, inside the hooks that sharding puts around it."""
    for module in modules:
        module.forward = torch.compile(module.forward)
