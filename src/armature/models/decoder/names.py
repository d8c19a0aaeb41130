"""The decoder's parameters under Hugging Face's names, both ways, with their sizes.

One table for all families.
"""

import re

EMBEDDING, HEAD = "embed.weight", "head.weight"
NAMES = {  # ours → theirs; {} is the block's number
    EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
    "blocks.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blocks.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    **{
        f"blocks.{{}}.attention.{p}.weight": f"model.layers.{{}}.self_attn.{p}_proj.weight"
        for p in "qkvo"
    },
    **{
        f"blocks.{{}}.attention.{p}.bias": f"model.layers.{{}}.self_attn.{p}_proj.bias"
        for p in "qkv"
    },
    **{
        f"blocks.{{}}.attention.{p}_norm.weight": f"model.layers.{{}}.self_attn.{p}_norm.weight"
        for p in "qk"
    },
    **{
        f"blocks.{{}}.ffn.{p}.weight": f"model.layers.{{}}.mlp.{p}_proj.weight"
        for p in ("gate", "up", "down")
    },
}
UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")  # older folders hold it; it is computed


def theirs(name: str) -> str | None:
    """Return Hugging Face's name of one of the decoder's parameters.

    None for one that they do not have.
    """
    number = re.search(r"\.(\d+)\.", name)
    pattern = NAMES.get(name.replace(number[0], ".{}.", 1) if number else name)
    return None if pattern is None else pattern.format(number[1] if number else "")
