"""A tiny Qwen3-MoE of transformers, and the logits of a folder. Runs by tests/finetune/extras.py.

mixture_reference.py make FOLDER OUT      write a folder, and its logits
mixture_reference.py logits FOLDER OUT    write the logits of a folder that is there
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

CONFIG = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def ids() -> torch.Tensor:
    return torch.randint(
        0, CONFIG["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(3)
    )


def main() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    what, folder, out = sys.argv[1:]
    if what == "make":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG))
        for name, value in model.named_parameters():
            nn.init.normal_(value, 1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(folder, max_shard_size="60KB")
    model = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        save_file({"logits": model(ids()).logits}, out)


if __name__ == "__main__":
    main()
