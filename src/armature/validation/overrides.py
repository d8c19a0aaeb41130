"""Apply `key=value` to the configuration of a run that exists, for the scripts that use the run.

Torch-free.
"""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from armature import config
from armature.data.batching import LOADER_KEYS
from armature.errors import ConfigError
from armature.project import options
from armature.validation import compose, foreign_keys
from armature.validation.quoting import quoted

_REFERENCE = re.compile(r"\$\{[^:{}]+\}")  # to another key, as in ${data.path}
_OPEN = ("callbacks", "data", "task")  # what their classes take may be added
_OF_LOADERS = [f"data.{name}" for name in LOADER_KEYS]


def apply(cfg: DictConfig, overrides: list[str], *, calls_callbacks: bool = False) -> None:
    """Change a run's configuration in place. Keys that refer to a changed key follow it.

    A group's option can be chosen, too: `data=text data.path=…`. Raises ConfigError for a key that
    the configuration does not have.

    Args:
        calls_callbacks: whether callbacks can be added (`+callbacks.x=…`) and left out.
    """
    if not overrides:
        return
    problems: list[str] = []
    # options first
    for override in sorted(overrides, key=lambda each: "." in config.key_of(each)):
        parsed = compose.parse_override(quoted(override))
        if parsed is None or parsed.is_sweep_override():
            problems.append(compose.of_no_form(override))
            continue
        key, _, value = override.partition("=")
        group = parsed.key_or_group.partition(".")[0]
        changes = not (parsed.is_add() or parsed.is_delete())
        if group == "callbacks" and not (changes or calls_callbacks):
            problems.append(
                f"{override}: only evaluate.py and predict.py call callbacks. Leave it out."
            )
        elif key in cfg and isinstance(parsed.value(), str) and options(key):
            with open_dict(cfg):
                cfg[key] = compose.composed([f"{key}='{value}'"])[key]
        # keys of a loader are of a plain LightningDataModule
        elif not (changes or group in _OPEN) or compose.apply(cfg, parsed, adds=key in _OF_LOADERS):
            add = foreign_keys.nearest(key, dict(config.walk(config.unresolved(cfg))))
            if changes and group in _OPEN:
                add = f" To add it, type +{override}.{add}"
            problems.append(
                f"{override}: the run's configuration has no key '{parsed.key_or_group}'.{add}"
            )
    if problems:
        raise ConfigError(problems)
    if empty := [
        f"{group}.{key}"
        for group in ("model", "data", "task")
        for key in cfg.get(group) or ()
        if OmegaConf.is_missing(cfg[group], key)
    ]:
        raise ConfigError(f"{', '.join(empty)}: without a value. Type {empty[0]}=…, too.")


def keep_references(raw: Any, resolved: Any) -> Any:
    """Return `resolved`, but with the references to other keys that `raw` has, so that a later
    change reaches all.
    """
    if isinstance(raw, dict):
        return {key: keep_references(value, resolved[key]) for key, value in raw.items()}
    if isinstance(raw, list):
        return [*map(keep_references, raw, resolved)]
    refers = isinstance(raw, str) and "${" in raw and "${" not in _REFERENCE.sub("", raw)
    return raw if refers else resolved
