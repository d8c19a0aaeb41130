"""What a mixture costs, from its constructor's arguments, if each expert gets equally many tokens.

Torch-free.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from armature.models.cost import Cost
from armature.models.decoder.check import ffn_hidden_of
from armature.models.decoder.cost import cost as decoder_cost


def cost(args: Mapping[str, Any]) -> Cost:
    """Return the cost of `MixtureDecoder(**args)` on samples of `context` tokens.

    Its blocks are taken as equal: the parameters of first dense blocks, and their arithmetic, are
    spread over all.
    """
    width, layers, dense = args["width"], args["layers"], args.get("dense_layers", 0)
    experts, active, hidden = args["experts"], args["active"], args["expert_hidden"]
    # of the blocks that are mixtures
    shared, share = (args.get("shared_hidden") or 0, 1 - dense / layers)
    alike, ffn = decoder_cost(args), args.get("ffn_hidden") or ffn_hidden_of(width)
    own = round(share * 3 * width * hidden * experts)
    used = round(share * (3 * width * (hidden * active + shared) + width * experts))
    without = round(share * 3 * width * ffn)
    # gate, its silu, up, their product; rows in and out
    routed = round(share * active * (4 * hidden + 3 * width))
    return replace(
        alike,
        block=alike.block - without + round(share * (3 * width * shared + width * experts)) + own,
        block_matrices=alike.block_matrices - without + used,
        idle_matrices=own - round(share * 3 * width * hidden * active),
        experts=own,
        rows=round(share * active * width),
        inner=alike.inner + round(share * 4 * (shared - ffn)) + routed,
        products=alike.products
        + round(share * (2 * (shared - ffn) + active * (2 * hidden + width))),
        linears=(),
    )
