"""Check the hooks that users define against how they are called, before training: one of the end
would cost a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from armature.errors import ConfigError
from armature.layout import Layout
from armature.validation import lightning_callbacks

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_NAMED = (
    *STEPS, "setup", "teardown", "prepare_data", "configure_optimizers", "configure_callbacks",
    "configure_model", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "backward", "transfer_batch_to_device", "train_dataloader",
    "val_dataloader", "test_dataloader", "predict_dataloader",
)  # fmt: skip
_BY_NAME = ("stage", "gradient_clip_val", "gradient_clip_algorithm")  # passed by their names
_OPTIMIZING = ("configure_gradient_clipping", "optimizer_step")  # their defaults are not used


class CheckCallbacks(L.Callback):
    """Check callbacks from a module's `configure_callbacks`, or from a function, as those of a
    config are checked.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise ConfigError for callbacks that cannot be right, before any of them begins."""
        callbacks = trainer.callbacks if stage == "fit" else []  # pyright: ignore[reportAttributeAccessIssue]
        kinds, layout = dict.fromkeys(type(each) for each in callbacks), Layout.of(self._cfg)
        found = [lightning_callbacks.problem_of_object(kind, self._cfg, layout) for kind in kinds]
        check(*callbacks, base=L.Callback, problems=[each for each in found if each is not None])


def check(*owners: Any, base: type, problems: Sequence[str] = ()) -> None:
    """Raise ConfigError for hooks that cannot be called as Lightning 2 calls them.

    Args:
        owners: modules, data modules or callbacks.
        base: the class of Lightning that defines their hooks.
        problems: others, to be reported with these.
    """
    found = [_problem(owner, name, base) for owner in owners for name in _hooks(base)]
    if found := [*problems, *(each for each in found if each is not None)]:
        raise ConfigError(found)


def _hooks(base: type) -> list[str]:
    names = (name for name in dir(base) if name.startswith("on_") or name in _NAMED)
    return [name for name in names if inspect.isfunction(inspect.getattr_static(base, name))]


def _problem(owner: Any, name: str, base: type) -> str | None:
    """Return that a hook of the user's takes none of its calls, and how to define it, or None."""
    own = getattr(owner, name, None)
    try:
        if not callable(own) or not is_overridden(name, owner, base):
            return None
        signatures = [inspect.signature(own), inspect.signature(own, follow_wrapped=False)]
    except (AttributeError, TypeError, ValueError):  # not written in Python
        return None
    calls = _calls(name, getattr(base, name))
    if any(_takes(signature, *call) for signature in signatures for call in calls):
        return None
    arguments = ", ".join([*calls[0][0], *calls[0][1]])
    definition = f"def {name}({', '.join(filter(None, ['self', arguments]))})"
    return (
        f"{type(owner).__name__}.{name}{signatures[0]}: it is called with ({arguments}). Define it "
        f"as {definition}."
    )


def _calls(name: str, hook: Callable[..., Any]) -> list[tuple[list[str], list[str]]]:
    """Return the ways in which a hook may be called: the names of its arguments by position, and by
    keyword.
    """
    if name in STEPS:
        return [(["batch", "batch_idx"], []), (["batch"], []), (["batch", "i", "dataloader"], [])]
    taken = [*inspect.signature(hook).parameters.values()][1:]
    needed = [
        each.name
        for each in taken
        if each.kind is each.POSITIONAL_OR_KEYWORD
        if each.default is each.empty or name in _OPTIMIZING
    ]
    by_name = [each for each in needed if each in _BY_NAME]
    # with the defaults as well: `dataloader_idx`, if there are several loaders
    ways = [([each for each in needed if each not in by_name], by_name)]
    return [*ways, ([each.name for each in taken], [])]


def _takes(signature: inspect.Signature, args: list[str], keywords: list[str]) -> bool:
    try:
        signature.bind(*args, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
