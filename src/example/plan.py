"""How the model beside this file may be sharded.

Without a plan: single, ddp, fsdp, hsdp and deepspeed only.
"""

from armature.models.plan import Plan

PLAN = Plan(
    blocks="blocks",
    first=("embed",),  # what only the first pipeline stage holds
    last=("head",),  # what only the last one holds
    tensor={"blocks.*.up": "column", "blocks.*.down": "row"},  # every rank holds the rest whole
    divided=("width",),  # constructor arguments that strategy.tensor must divide
)
