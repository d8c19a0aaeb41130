"""Numbers that a configuration takes from the environment, where every value is a text."""

from __future__ import annotations

import re
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from armature.validation import signatures, values

_NUMBERS = {int, float, bool}
_WORDS = {"true": True, "false": False}


def written_out(cfg: DictConfig) -> DictConfig:
    """Write out the numbers that a resolver makes, as in `seed=${oc.env:SEED}`: config.yaml has no
    types.

    A text becomes one where its key is meant to hold a number, such as one that takes a number or
    `auto`.
    """
    cfg = cfg.copy()
    for path, value in values.walk(OmegaConf.to_container(cfg, resolve=False)):
        if isinstance(value, str) and re.fullmatch(r"\$\{[\w.]+:.*\}", value):
            found = OmegaConf.select(cfg, path)
            found = _number(cfg, path, found) if isinstance(found, str) else found
            if isinstance(found, int | float):
                OmegaConf.update(cfg, path, found)
    return cfg


def _number(cfg: DictConfig, path: str, text: str) -> Any:
    """Return the number, or true or false, that a text stands for at a key, or the text."""
    for read in (int, float, lambda word: _WORDS[word.lower()]):
        try:
            number = read(text)
        except (ValueError, KeyError):
            continue
        return number if _takes(cfg, path, number, text) else text
    return text


def _takes(cfg: DictConfig, path: str, number: Any, text: str) -> bool:
    """Return whether a key is meant to hold the number: by its rule, its argument's annotation or
    its default.
    """
    if path == "data.micro_batch_size":
        return True
    if (known := values.schema(OmegaConf.to_container(cfg))).get(path) is not None:  # pyright: ignore[reportArgumentType]
        return values.accepts(known[path], number) and not values.accepts(known[path], text)
    parent, _, key = path.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else None
    target = str(node.get("_target_")) if isinstance(node, DictConfig) else ""
    definition = signatures.find_definition(target) if target else None
    if definition is None:
        return False
    hint = signatures.signature_of(*definition).parameters.get(key)
    default = signatures.defaults_of(target).get(key)
    meant = isinstance(default, int | float) or _NUMBERS & {hint, *get_args(hint)}
    return signatures.accepts(hint, number) and bool(meant)
