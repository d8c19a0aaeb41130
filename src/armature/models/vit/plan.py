"""How a vision transformer may be sharded.

Positions are few and the head is small: only the blocks' matrices pay.
"""

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
