"""How a mixture may be sharded: as a decoder, and its experts over ranks of their own."""

from dataclasses import replace

from armature.models.decoder.plan import PLAN as DECODER

_FFN = {
    pattern: style
    for pattern, style in DECODER.tensor.items()
    if ".ffn" in pattern and "norm" not in pattern
}
_SHARED = {pattern.replace(".ffn", ".mixture.shared"): style for pattern, style in _FFN.items()}

PLAN = replace(
    DECODER,
    tensor={**DECODER.tensor, "blocks.*.mixture.router": "sequence", **_SHARED},
    optional=(*DECODER.optional, *_FFN, *_SHARED),  # dense blocks, shared experts
    divided=(*DECODER.divided, "shared_hidden"),
    experts="blocks.*.mixture.experts",
    expert_count="experts",
)
