"""Models of Hugging Face folders that transformers itself computes: what can be said of them before torch is imported.

`built.py` checks the rest against the model itself.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from armature.errors import ConfigError

PACKAGE = "armature.models.huggingface.model"
CAUSAL = f"{PACKAGE}.CausalLM"
TARGETS = (CAUSAL,)
OLDEST = (5, 20)  # of transformers, as requirements-finetune.txt
_INSTALL = "Type make setup EXTRAS=finetune"
# a model of text, images or sound has its sizes of text in a part of its own
_TEXT = ("text_config", "decoder", "generator", "language_config", "llm_config")


def arguments(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return what config.json says of a model's arguments. Raises ConfigError with everything that is wrong with it."""
    require_transformers(f"model.pretrained={name}")
    found = []
    if not isinstance(config.get("model_type"), str):
        found.append("it lacks model_type")
    if config.get("quantization_config"):
        found.append("quantization_config: its weights are quantized. Name the folder of the original weights")
    if found:
        raise ConfigError([f"model.pretrained={name}: config.json: {problem}." for problem in found])
    return {"vocab_size": vocab_size(config)}


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that a model knows; None if config.json leaves it to transformers."""
    parts = [config, *(config.get(key) or {} for key in _TEXT)]
    sizes = (part.get("vocab_size") for part in parts if isinstance(part, Mapping))
    return next((size for size in sizes if isinstance(size, int)), None)


def require_transformers(what: str) -> None:
    """Raise ConfigError if transformers is missing or too old. It is not imported, which takes seconds."""
    needed = f"{what}: this model needs transformers {'.'.join(map(str, OLDEST))} or newer"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{needed}, which is not installed. {_INSTALL}.") from None
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        raise ConfigError(f"{needed}, and this is {version}. {_INSTALL}.")
