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
from armature.training.run_hooks import RunHooks
from armature.validation import lightning_callbacks

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_NAMED = (
    *STEPS, "setup", "teardown", "prepare_data", "configure_optimizers", "configure_callbacks",
    "configure_model", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step", "backward", "transfer_batch_to_device", "train_dataloader",
    "val_dataloader", "test_dataloader", "predict_dataloader",
)  # fmt: skip
_BY_NAME = ("stage", "gradient_clip_val", "gradient_clip_algorithm")  # passed by their names


class CheckCallbacks(RunHooks, L.Callback):
    """Check callbacks from a module's `configure_callbacks`, or from a function, as those of a
    config are checked; and after each step, that what was decided from settings still holds.
    """

    def __init__(self, cfg: DictConfig, check_unchanged: Callable[[L.Trainer], None]) -> None:
        self._cfg, self._check_unchanged = cfg, check_unchanged

    def training_begins(self, trainer: L.Trainer) -> None:
        self._check_unchanged(trainer)

    step_ended = training_begins

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
    hooks = {
        name: hook
        for name, hook in inspect.getmembers(base, inspect.isfunction)
        if name.startswith("on_") or name in _NAMED
    }
    found = [_problem(owner, name, hook, base) for owner in owners for name, hook in hooks.items()]
    if found := [*problems, *filter(None, found)]:
        raise ConfigError(found)


def _problem(owner: Any, name: str, hook: Callable[..., Any], base: type) -> str | None:
    """Return that a hook of the user's takes none of its calls, and how to define it, or None."""
    try:
        if not is_overridden(name, owner, base):
            return None
        own = inspect.signature(getattr(owner, name), follow_wrapped=False)
    except (AttributeError, TypeError, ValueError):  # not written in Python
        return None
    calls = _calls(name, hook)
    if any(_takes(own, call) for call in calls):
        return None
    arguments = ", ".join(calls[0])
    definition = f"def {name}({', '.join(filter(None, ['self', arguments]))})"
    return (
        f"{type(owner).__name__}.{name}{own}: it is called with ({arguments}). Define it "
        f"as {definition}."
    )


def _calls(name: str, hook: Callable[..., Any]) -> list[list[str]]:
    """Return the ways in which a hook may be called, as the names of its arguments."""
    if name in STEPS:
        return [["batch", "batch_idx"], ["batch"], ["batch", "batch_idx", "dataloader_idx"]]
    taken = [
        each
        for each in [*inspect.signature(hook).parameters.values()][1:]
        if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    # with the defaults as well: `dataloader_idx`, if there are several loaders
    needed = [each.name for each in taken if each.default is each.empty]
    return [needed, [each.name for each in taken]]


def _takes(signature: inspect.Signature, arguments: list[str]) -> bool:
    by_name = [each for each in arguments if each in _BY_NAME]
    try:
        signature.bind(
            *[each for each in arguments if each not in by_name], **dict.fromkeys(by_name)
        )
    except TypeError:
        return False
    return True
