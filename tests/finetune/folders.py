"""Tiny Hugging Face folders, written without transformers: of zeros, or of random numbers."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from armature.checkpoint import huggingface
from armature.finetune import architecture, folder
from armature.models.decoder.model import Decoder
from armature.models.decoder.names import theirs
from armature.parallel import initialization

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a folder by their names there."""
    with torch.device("meta"):
        model = Decoder(**architecture.arguments(config, name="tiny"), context=8)
    return {str(theirs(name)): tuple(param.shape) for name, param in model.named_parameters()}


def write_shard(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(end))


def write_model(path: Path, **changes: Any) -> Path:
    """Write config.json and two shards with their index.

    `changes` of config.json; None removes a key.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / folder.CONFIG).write_text(json.dumps(config))
    sound = CONFIG | {
        key: value for key, value in changes.items() if isinstance(value, int) and key in CONFIG
    }
    named = shapes(sound)
    listed = {}
    for number, part in enumerate((list(named)[::2], list(named)[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_shard(path / file, {name: named[name] for name in part})
        listed |= dict.fromkeys(part, file)
    (path / folder.INDEX).write_text(json.dumps({"weight_map": listed}))
    return path


def write_random_model(path: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write config.json with these changes, and random weights in one file, norms as well; large
    ones, which matter.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (path / folder.CONFIG).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: float(len(shape) == 1) + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes(config).items()
    }
    save_file(tensors, path / folder.WEIGHTS, metadata={"format": "pt"})
    return path


def read(kind: Callable[..., Any], **arguments: Any) -> Any:
    """Build a model of this class with the weights of its folder."""
    with torch.device("meta"):
        model = kind(**arguments)
    initialization.materialize(model, device=torch.device("cpu"))
    huggingface.read(model, huggingface.imported_names(model))
    return model.eval()


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a folder, of all of its files."""
    from safetensors.torch import load_file

    files = map(load_file, path.glob("*.safetensors"))
    return {name: value for file in files for name, value in file.items()}


def write_tokenizer(path: Path, tokens: int) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(path / folder.TOKENIZER))
