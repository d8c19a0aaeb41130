"""The command `armature` of an installed library, and JSON Schemas for editors."""
