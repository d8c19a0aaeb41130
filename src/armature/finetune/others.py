"""Models that transformers or timm itself computes: what can be said of their folders before torch
is imported.

`built.py` checks the rest against the model itself.
"""

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

from armature.errors import ConfigError

PACKAGE = "armature.models.huggingface.model"
CAUSAL = f"{PACKAGE}.CausalLM"
CLASSIFIER = f"{PACKAGE}.SequenceClassifier"
TARGETS = (CAUSAL, CLASSIFIER)
IMAGES = "armature.models.timm.model.ImageClassifier"
OLDEST = (5, 20)  # of transformers, as pyproject.toml
_INSTALL = "Type make setup EXTRAS=finetune"
_INSTALL_TIMM = "Type make setup EXTRAS=timm, or pip install --no-deps timm"
# a model of text, images or sound has its sizes of text in a part of its own
_TEXT = ("text_config", "decoder", "generator", "language_config", "llm_config")


def arguments(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return what config.json says of a model's arguments."""
    require_transformers(f"model.pretrained={name}")
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"model.pretrained={name}: config.json: it lacks model_type.")
    return {"vocab_size": vocab_size(config)}


def image_arguments(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Return what config.json of timm says of a model's arguments.

    Raises ConfigError for a folder of another kind.
    """
    if importlib.util.find_spec("timm") is None:
        raise ConfigError(
            f"model.pretrained={name}: this model needs timm, which is not installed. "
            f"{_INSTALL_TIMM}."
        )
    if not isinstance(config.get("architecture"), str):
        kind = (
            f", but model_type={config['model_type']}, as transformers writes"
            if "model_type" in config
            else ""
        )
        raise ConfigError(
            f"model.pretrained={name}: config.json: it has no architecture, the name of a model of "
            f"timm{kind}. Name a "
            "folder as timm's save_for_hf(…, safe_serialization=True) writes it."
        )
    made: Any = config.get("pretrained_cfg") or config  # older folders have its entries at the top
    args: Any = config.get("model_args") or {}
    size, channels = args.get("img_size"), args.get("in_chans")
    shape = made.get("input_size")
    if isinstance(shape, list) and len(shape) == 3:
        channels = shape[0] if channels is None else channels
        size = shape[1] if size is None and made.get("fixed_input_size") else size
    size = size[0] if isinstance(size, list) else size
    return {
        key: value
        for key, value in (("image_size", size), ("channels", channels))
        if value is not None
    }


def normalization(config: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the mean and the deviation of each channel that a model of timm was trained with, as
    far as it says so.
    """
    made: Any = config.get("pretrained_cfg") or config
    return {key: list(made[key]) for key in ("mean", "std") if isinstance(made.get(key), list)}


def class_names(config: Mapping[str, Any]) -> list[str] | None:
    """Return the classes of a head in the order of their numbers.

    LABEL_0, LABEL_1, … name numbers alone. None: the folder has no head for classes of texts, or
    (timm) does not name them.
    """
    if "architecture" in config:  # of timm
        made: Any = config.get("pretrained_cfg") or {}
        names = config.get("label_names") or made.get("label_names")
        return list(map(str, names)) if isinstance(names, list) and names else None
    classes, named = config.get("architectures"), config.get("id2label")
    if not any(str(each).endswith("ForSequenceClassification") for each in classes or []):
        return None
    if not isinstance(named, Mapping):  # config.json leaves out two classes without names
        return [f"LABEL_{i}" for i in range(config.get("num_labels") or 2)]
    if {*map(str, named)} != {*map(str, range(len(named)))}:
        return None
    return [str(named[key]) for key in sorted(named, key=int)]


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that a model knows.

    None if config.json leaves it to transformers.
    """
    parts = [config, *(config.get(key) or {} for key in _TEXT)]
    sizes = (part.get("vocab_size") for part in parts if isinstance(part, Mapping))
    return next((size for size in sizes if isinstance(size, int)), None)


def require_transformers(what: str) -> None:
    """Raise ConfigError if transformers is missing or too old.

    It is not imported, which takes seconds.
    """
    needed = f"{what}: this model needs transformers {'.'.join(map(str, OLDEST))} or newer"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{needed}, which is not installed. {_INSTALL}.") from None
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        raise ConfigError(f"{needed}, and this is {version}. {_INSTALL}.")
