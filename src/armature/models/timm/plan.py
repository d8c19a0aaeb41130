"""How a model of timm may be sharded: its blocks are found once it is built (`model.py`)."""

from armature.models.plan import Plan

PLAN = Plan(from_instance=True)
