"""What a decoder costs, from its constructor's arguments. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from armature.models.cost import Cost


def cost(args: Mapping[str, Any]) -> Cost:
    """Return the cost of `Decoder(**args)` on samples of `context` tokens."""
    width, heads, vocabulary = args["width"], args["heads"], args["vocab_size"]
    keys = (args.get("kv_heads") or heads) * (width // heads)
    hidden = args.get("ffn_hidden") or -(-8 * width // 3 // 64) * 64
    tied, matrices = bool(args.get("tied", False)), 2 * width * width + 2 * width * keys + 3 * width * hidden
    return Cost(
        first=vocabulary * width, block=matrices + 2 * width, last=width + (0 if tied else vocabulary * width),
        blocks=args["layers"], tied=tied, positions=args["context"], width=width, norms=2,
        norm_bytes=8, shared_inputs=2 * width,
        inner=3 * width + 2 * keys + 4 * hidden,  # q, attention twice, k, v; gate, its silu, up, their product
        products=4 * width + 2 * keys + 2 * hidden, outputs=2 * width, block_matrices=matrices,
        head_matrices=vocabulary * width, attention=width, classes=vocabulary, losses=args["context"],
        chunked_loss=True, unit="tokens",
    )  # fmt: skip
