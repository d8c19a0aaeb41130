"""Apply `key=value` to the configuration of a run that exists, for the scripts that use the run.

Torch-free.
"""

import re
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from armature import config
from armature.data.batching import LOADER_KEYS
from armature.data.tokenizer import TOKENIZER_FILE
from armature.errors import ConfigError
from armature.project import config_file
from armature.validation.compose import CONFIG_ERRORS
from armature.validation.composing import composing

_REFERENCE = re.compile(r"\$\{[^:{}]+\}")  # to another key, as in ${data.path}
_MISSING = object()


def apply(
    cfg: DictConfig, overrides: list[str], *, run_dir: Path, calls_callbacks: bool = False
) -> None:
    """Change a run's configuration in place. Keys that refer to a changed key follow it.

    A group's option can be chosen, too: `data=text data.path=…`. Text that the run was not trained
    on is read with the run's own tokenizer. Raises ConfigError for a key that the configuration
    does not have.

    Args:
        calls_callbacks: whether callbacks can be added (`+callbacks.x=…`) and left out.
    """
    if not overrides:
        return
    source = _source(cfg)
    # options first
    for override in sorted(overrides, key=lambda override: "." in override.partition("=")[0]):
        if override.lstrip("+~").startswith("callbacks."):
            if override[0] in "+~" and not calls_callbacks:
                raise ConfigError(
                    f"{override}: only evaluate.py and predict.py call callbacks. Leave it out."
                )
            _override_callback(cfg, override)
            continue
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override}: type KEY=VALUE, as in data.eval_batch_size=64.")
        if config_file(key, value):
            with open_dict(cfg):
                cfg[key] = _option(key, value)
            continue
        missing = OmegaConf.select(cfg, key, default=_MISSING, throw_on_missing=False) is _MISSING
        loaders = {f"data.{name}" for name in LOADER_KEYS}  # of a plain LightningDataModule
        if missing and not _is_required(cfg, key) and key not in loaders:
            raise ConfigError(f"{override}: the run's configuration has no key '{key}'.")
        with open_dict(cfg):
            OmegaConf.update(cfg, key, OmegaConf.from_dotlist([f"value={value}"]).value)
    nodes = {
        group: cfg[group]
        for group in ("model", "data", "task")
        if isinstance(cfg.get(group), DictConfig)
    }
    if empty := [
        f"{group}.{key}"
        for group, node in nodes.items()
        for key in node
        if OmegaConf.is_missing(node, key)
    ]:
        raise ConfigError(f"{', '.join(empty)}: without a value. Type {empty[0]}=…, too.")
    tokenizer = run_dir / TOKENIZER_FILE
    changed = _source(cfg)
    if changed != source and changed.get("tokenizer", _MISSING) is None and tokenizer.is_file():
        cfg.data.source.tokenizer = str(tokenizer)


def _override_callback(cfg: DictConfig, override: str) -> None:
    """Add, change or remove a callback, or a key of one, as train.py does."""
    try:
        parsed = OverridesParser.create().parse_override(override)
        key, value = parsed.key_or_group, parsed.value()
    except CONFIG_ERRORS as error:
        raise ConfigError(f"{override}: {error}") from error
    group, _, leaf = key.rpartition(".")
    exists = OmegaConf.select(cfg, key, default=_MISSING, throw_on_missing=False) is not _MISSING
    if not exists and not parsed.is_add():
        remedy = "" if parsed.is_delete() else f" To add it, type '+{override.lstrip('+')}'."
        raise ConfigError(f"{override}: the run's configuration has no key '{key}'.{remedy}")
    with open_dict(cfg):
        if parsed.is_delete():
            del OmegaConf.select(cfg, group)[leaf]
        else:
            cfg.callbacks = cfg.callbacks or {}
            OmegaConf.update(cfg, key, value)


def _is_required(cfg: DictConfig, key: str) -> bool:
    """Return whether the key is there and waits for a value (???)."""
    group, _, leaf = key.rpartition(".")
    node = OmegaConf.select(cfg, group, throw_on_missing=False) if group else cfg
    return isinstance(node, DictConfig) and OmegaConf.is_missing(node, leaf)


def _source(cfg: DictConfig) -> dict[str, Any]:
    node = OmegaConf.select(cfg, "data.source", throw_on_missing=False)
    if not isinstance(node, DictConfig):
        return {}
    return OmegaConf.to_container(node, resolve=True)  # pyright: ignore[reportReturnType]


def _option(group: str, name: str) -> Any:
    """Return a group's option as train.py would compose it."""
    config.register()
    GlobalHydra.instance().clear()
    try:
        with composing():
            return compose("train", overrides=[f"{group}='{name}'"])[group]
    except CONFIG_ERRORS as error:
        raise ConfigError(f"{group}={name}: {error}") from error


def keep_references(raw: Any, resolved: Any) -> Any:
    """Return `resolved`, but with the references to other keys that `raw` has, so that a later
    change reaches all.
    """
    if isinstance(raw, dict):
        return {key: keep_references(value, resolved[key]) for key, value in raw.items()}
    if isinstance(raw, list):
        return [keep_references(*pair) for pair in zip(raw, resolved, strict=True)]
    refers = isinstance(raw, str) and "${" in raw and "${" not in _REFERENCE.sub("", raw)
    return raw if refers else resolved
