"""Small random models of transformers, and their logits. Called by extras.call."""

import json
from pathlib import Path

import torch
from torch import nn

TINY = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    # with the usual 0.02 such small models attend evenly, and wrong positions go unseen
    "initializer_range": 0.2,
}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **STRETCHED,
}
FAMILIES = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "smollm2": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 16}),
    "qwen2": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **STRETCHED},
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(3))


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids()).logits


def make(root: str) -> None:
    """Write a folder for each family, and logits.safetensors of all."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, (kind, more) in FAMILIES.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **more))
        for parameter, value in model.named_parameters():
            if value.ndim == 1:
                nn.init.normal_(value, 1.0 if "norm" in parameter else 0.0, 0.2)
        model.save_pretrained(Path(root, name), max_shard_size="160KB")
        write_old_dialect(Path(root, name))
    found = {name: logits(Path(root, name)) for name in FAMILIES}
    save_file(found, Path(root, "logits.safetensors"))


def write_logits(folder: str, file: str) -> None:
    from safetensors.torch import save_file

    save_file({"logits": logits(Path(folder))}, file)


def write_old_dialect(folder: Path) -> None:
    """Write config.json as transformers 4 did, beside the new one."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta", 10000.0)
    kind = rope.pop("rope_type", "default")
    name = "type" if kind in ("linear", "yarn") else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {name: kind, **rope}
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    (folder / "old_config.json").write_text(json.dumps(config))
