"""Rules for a decoder's sizes, for the constructor and, torch-free, for the check before launch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from armature.models.sizes import nearest_divisor, nearest_multiple

ROPE_SCALING = {  # kind → numbers that it needs, and that it may have
    "llama3": (("factor", "high_frequency", "low_frequency", "original_context"), ()),
    "yarn": (("factor", "original_context"), ("attention_factor", "beta_fast", "beta_slow")),
    "linear": (("factor",), ()),
}


def problems(args: Mapping[str, Any]) -> list[str]:
    """Return every reason why `Decoder(**args)` cannot be built, each with both values and a
    remedy.
    """
    found = _scaling_problems(args.get("rope_scaling"))
    token, vocabulary = args.get("document_token"), args.get("vocab_size")
    if token is not None and vocabulary is not None and token >= vocabulary:
        found.append(
            f"model.document_token={token} is not one of the model.vocab_size={vocabulary} tokens"
        )
    windows, layers = args.get("windows"), args.get("layers")
    if isinstance(windows, Sequence) and len(windows) != layers:
        found.append(
            f"model.windows has {len(windows)} entries, but model.layers={layers}: it needs one "
            "for each block"
        )
    width, heads = args.get("width"), args.get("heads")
    if width is None or heads is None:
        return found
    if (head_dim := args.get("head_dim")) is not None:
        if head_dim % 2:
            found.append(
                f"model.head_dim={head_dim} must be even, since rotary positions pair its elements"
            )
    elif width % heads:
        found.append(
            f"model.heads={heads} does not divide model.width={width}: "
            f"model.heads={nearest_divisor(width, heads)} does, or "
            f"model.width={nearest_multiple(width, 2 * heads)}"
        )
    elif width // heads % 2:
        found.append(
            f"model.width={width} over model.heads={heads} makes heads of an odd width, "
            f"{width // heads}, which rotary "
            f"positions cannot pair: type model.width={nearest_multiple(width, 2 * heads)}"
        )
    kv_heads = args.get("kv_heads") or heads
    if heads % kv_heads:
        found.append(
            f"model.kv_heads={kv_heads} does not divide model.heads={heads}: "
            f"model.kv_heads={nearest_divisor(heads, kv_heads)} does"
        )
    return found


def ffn_hidden_of(width: int) -> int:
    """Return the feed-forward width if `ffn_hidden` is left out."""
    return -(-8 * width // 3 // 64) * 64


def windows_of(
    windows: int | Sequence[int | None] | None, *, layers: int
) -> tuple[int | None, ...]:
    """Return each block's window: positions that one attends to, itself included; None: all."""
    return (windows,) * layers if windows is None or isinstance(windows, int) else tuple(windows)


def attended_share(args: Mapping[str, Any]) -> float:
    """Return the share of the context that a position attends to, as a mean of all blocks; 1: no
    windows.
    """
    windows, context = windows_of(args.get("windows"), layers=args["layers"]), args["context"]
    return sum(min(window or context, context) for window in windows) / (len(windows) * context)


def _scaling_problems(scaling: Any) -> list[str]:
    if scaling is None:
        return []
    kind = scaling.get("kind", "llama3") if isinstance(scaling, Mapping) else None
    if kind not in ROPE_SCALING:
        return [
            f"model.rope_scaling needs a kind ({', '.join(ROPE_SCALING)}) and its numbers. Got "
            f"{scaling!r}"
        ]
    given, (needed, possible) = set(scaling) - {"kind"}, ROPE_SCALING[kind]
    if not set(needed) <= given <= {*needed, *possible}:
        may = f", and may have {', '.join(possible)}" if possible else ""
        keys = ", ".join(needed)
        return [
            f"model.rope_scaling needs exactly the keys {keys} for kind={kind}{may}. Got "
            f"{scaling!r}"
        ]
    return [
        f"model.rope_scaling.{key} must be a number above 0. Got {scaling[key]!r}"
        for key in sorted(given)
        if isinstance(scaling[key], bool)
        or not isinstance(scaling[key], int | float)
        or not 0 < scaling[key] < math.inf
    ]
