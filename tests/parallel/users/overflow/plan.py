from armature.models.decoder.plan import PLAN as PLAN
