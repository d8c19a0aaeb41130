"""How a decoder may be sharded."""

from armature.models.plan import Plan

PLAN = Plan(
    first=("embed",),
    last=("norm", "head"),
    tensor={
        "embed": "vocabulary",
        "blocks.*.attention_norm": "sequence",
        "blocks.*.attention": "gather",
        "blocks.*.attention.[qkv]": "column",
        "blocks.*.attention.[qk]_norm": "heads",
        "blocks.*.attention.o": "row",
        "blocks.*.ffn_norm": "sequence",
        "blocks.*.ffn": "gather",
        "blocks.*.ffn.gate": "column",
        "blocks.*.ffn.up": "column",
        "blocks.*.ffn.down": "row",
        "norm": "sequence",
        "head": "logits",
    },
    optional=("blocks.*.attention.[qk]_norm",),
    divided=("heads", "kv_heads", "ffn_hidden", "vocab_size"),
    sequence="context",
    context={"embed": "part", "blocks.*.attention.core": "causal"},
    tied="tied",
    needs_inputs="document_token",
)
