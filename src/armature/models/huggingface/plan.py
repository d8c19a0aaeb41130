"""How a model of transformers may be sharded: it says so itself, once it is built
(`sharding.py`).
"""

from armature.models.plan import Plan

PLAN = Plan(from_instance=True)
