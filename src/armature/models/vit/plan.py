"""How a vision transformer may be divided. Few positions, a small head: only the blocks' matrices are worth it."""

from armature.models.plan import Plan

PLAN = Plan(
    first=("embed",),
    last=("norm", "head"),
    tensor={
        "blocks.*.attention": "gather",
        "blocks.*.attention.[qkv]": "column",
        "blocks.*.attention.o": "row",
        "blocks.*.ffn": "gather",
        "blocks.*.ffn.up": "column",
        "blocks.*.ffn.down": "row",
    },
    divided=("heads", "width", "ffn_hidden"),
)
