"""What a decoder costs, from its constructor's arguments. Torch-free."""

from collections.abc import Mapping
from typing import Any

from armature.models.cost import Cost
from armature.models.decoder.check import attended_share, ffn_hidden_of


def cost(args: Mapping[str, Any]) -> Cost:
    """Return the cost of `Decoder(**args)` on samples of `context` tokens."""
    width, heads, vocabulary = args["width"], args["heads"], args["vocab_size"]
    head_dim = args.get("head_dim") or width // heads
    queries, keys = heads * head_dim, (args.get("kv_heads") or heads) * head_dim
    hidden = args.get("ffn_hidden") or ffn_hidden_of(width)
    tied, matrices = (
        bool(args.get("tied", False)),
        2 * width * queries + 2 * width * keys + 3 * width * hidden,
    )
    small = 2 * width + (queries + 2 * keys if args.get("attention_bias") else 0)
    small += 2 * head_dim if args.get("qk_norm") == "weighted" else 0
    share = attended_share(args)
    return Cost(
        first=vocabulary * width,
        block=matrices + small,
        last=width + (0 if tied else vocabulary * width),
        blocks=args["layers"],
        tied=tied,
        positions=args["context"],
        width=width,
        norms=2,
        norm_bytes=8,
        shared_inputs=2 * width,
        # q, attention twice, k, v; gate, its silu, up, their product
        inner=3 * queries + 2 * keys + 4 * hidden,
        products=2 * queries + 2 * width + 2 * keys + 2 * hidden,
        outputs=2 * width,
        block_matrices=matrices,
        head_matrices=vocabulary * width,
        attention=queries if share == 1.0 else queries * share,
        queries=queries,
        keys=2 * keys,
        key_heads=args.get("kv_heads") or heads,
        classes=vocabulary,
        losses=args["context"],
        chunked_loss=True,
        unit="tokens",
        linears=(
            (queries, width),
            *[(keys, width)] * 2,
            (width, queries),
            *[(hidden, width)] * 2,
            (width, hidden),
        ),
    )
