"""The callbacks of a run that are not called when its model is measured or predicts."""

from __future__ import annotations

from typing import Any

from hydra.utils import get_object
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from omegaconf import DictConfig

from armature.checkpoint.of_ranks import NOT_USERS

_ALWAYS = ("setup", "on_load_checkpoint")


def note(cfg: DictConfig, stage: str) -> str | None:
    """Return a line that names the callbacks which Lightning would call in a stage, and how to have
    them, or None.

    Args:
        stage: "validate", "test" or "predict".
    """
    prefix = {"validate": "on_validation_"}.get(stage, f"on_{stage}_")
    names = [name for name in dir(Callback) if name in _ALWAYS or name.startswith(prefix)]
    if not (named := _named(cfg, names)):
        return None
    return (
        f"Not called here: {named}. What it changes, such as the weights, is as without it: let "
        "the module's own hooks "
        "do it, or take the run's validation and test (trainer.test_at_end=true)."
    )


def layers_note(cfg: DictConfig) -> str:
    """Return what to add to a message about weights that do not fit, if a callback's `setup` may
    make some, or "".
    """
    if not (named := _named(cfg, ["setup"])):
        return ""
    return (
        f" Not called here: {named}. If it makes layers, make them in the module's __init__ or "
        "configure_model."
    )


def _named(cfg: DictConfig, hooks: list[str]) -> str:
    found = {
        key: defined
        for key, node in (cfg.callbacks or {}).items()
        if (defined := _defined(node, hooks))
    }
    return "; ".join(f"callbacks.{key} ({', '.join(defined)})" for key, defined in found.items())


def _defined(node: Any, hooks: list[str]) -> list[str]:
    """Return those of the hooks that the user has defined in a callback's class, or what makes it
    if it is no class.
    """
    try:
        kind: Any = get_object(node._target_)
    except ImportError:  # of what this machine lacks, and this script does not need
        return [node._target_]
    if not isinstance(kind, type):
        return [node._target_]
    averages = issubclass(kind, WeightAveraging)  # Lightning's own counts, too
    defined = [name for name in hooks if getattr(kind, name) is not getattr(Callback, name)]
    # other callbacks of Lightning's and ours only watch, or loading takes them into account
    by_user = [
        name
        for name in defined
        if averages or not getattr(kind, name).__module__.startswith(NOT_USERS)
    ]
    return [f"{kind.__name__}.{name}" for name in by_user]
