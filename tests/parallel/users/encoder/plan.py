from armature.models.plan import Plan

PLAN = Plan(
    blocks="stack",
    first=("tokens",),
    last=("out",),
    tensor={"tokens": "vocabulary", "stack.*.up": "column", "stack.*.down": "row", "out": "logits"},
    divided=("vocab_size", "width"),
    layers="depth",
)
