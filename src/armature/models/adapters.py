"""Names of adapters' parameters (`armature.finetune.lora`), which a folder's weights do not
have.
"""

ADAPTERS = ("lora_A", "lora_B")


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter."""
    return name.rpartition(".")[2] in ADAPTERS
