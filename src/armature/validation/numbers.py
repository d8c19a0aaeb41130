"""Numbers that a configuration takes from the environment, where every value is a text."""

from __future__ import annotations

import re
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from armature.validation import signatures, values


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
    """Return the number, or true or false, that a text stands for at a key that is meant to hold
    one: by its type, its argument's annotation or its default.
    """
    try:
        number = OmegaConf.from_dotlist([f"number={text}"]).number
    except yaml.YAMLError:
        return text
    if not isinstance(number, int | float):
        return text
    parent, _, key = path.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else None
    target = str(node.get("_target_")) if isinstance(node, DictConfig) else ""
    hint = values.schema(OmegaConf.to_container(cfg)).get(path)  # pyright: ignore[reportArgumentType]
    if hint is not None:
        takes = [values.accepts(hint, each) for each in (number, text)]
    elif (definition := signatures.find_definition(target) if target else None) is not None:
        hint = signatures.signature_of(definition).parameters.get(key)
        default = signatures.defaults_of(target).get(key)
        of_default = isinstance(default, int | float)
        takes = [
            signatures.accepts(hint, number),
            not of_default and signatures.accepts(hint, text),
        ]
    else:
        return text
    return number if takes == [True, False] else text
