"""Rules for a decoder's sizes, for the constructor and, torch-free, for the check before launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from armature.models.sizes import fraction, nearest_divisor, nearest_multiple, whole_numbers

SIZES = ("vocab_size", "context", "width", "layers", "heads", "kv_heads", "ffn_hidden")
ROPE_SCALING = ("factor", "high_frequency", "low_frequency", "original_context")


def problems(args: Mapping[str, Any]) -> list[str]:
    """Return every reason why `Decoder(**args)` cannot be built, each with both values and a remedy."""
    found = whole_numbers(args, SIZES, optional=("kv_heads", "ffn_hidden")) + fraction(args, "dropout")
    scaling = args.get("rope_scaling")
    if scaling is not None and (not isinstance(scaling, Mapping) or sorted(scaling) != list(ROPE_SCALING)):
        found.append(f"model.rope_scaling needs exactly the keys {', '.join(ROPE_SCALING)}. Got {scaling!r}")
    token, vocabulary = args.get("document_token"), args.get("vocab_size")
    if token is not None and (isinstance(token, bool) or not isinstance(token, int) or token < 0):
        found.append(f"model.document_token must be the id of a token, or null. Got {token!r}")
    elif token is not None and isinstance(vocabulary, int) and token >= vocabulary:
        found.append(f"model.document_token={token} is not one of the model.vocab_size={vocabulary} tokens")
    if found:
        return found
    width, heads = args.get("width"), args.get("heads")
    if width is None or heads is None:
        return found
    if width % heads:
        found.append(
            f"model.heads={heads} does not divide model.width={width}: "
            f"model.heads={nearest_divisor(width, heads)} does, or model.width={nearest_multiple(width, 2 * heads)}"
        )
    elif width // heads % 2:
        found.append(
            f"model.width={width} over model.heads={heads} makes heads of an odd width, {width // heads}, which rotary "
            f"positions cannot pair: type model.width={nearest_multiple(width, 2 * heads)}"
        )
    kv_heads = args.get("kv_heads") or heads
    if heads % kv_heads:
        found.append(
            f"model.kv_heads={kv_heads} does not divide model.heads={heads}: "
            f"model.kv_heads={nearest_divisor(heads, kv_heads)} does"
        )
    return found
