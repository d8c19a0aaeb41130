"""What Lightning and torch refuse in a user's classes, in one message instead of a traceback."""

from __future__ import annotations

import itertools
import re
import traceback
from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from armature.checkpoint import directory
from armature.errors import ConfigError, is_users

_LIGHTNING = str(Path(L.__file__).parent)
_EMPTY = "optimizer got an empty parameter list"
# a warning of Lightning's, which continues without them
_UNKNOWN_KEYS = "Found unsupported keys in the "
# Lightning 1 had a frequency there, which modules with manual optimization read themselves
REFUSED_KEYS = _UNKNOWN_KEYS + r"(?!optimizer configuration: \{'frequency'\})"
_UNKNOWN_BY_HAND = r"()LRSchedulerConfig.__init__\(\) got an unexpected keyword argument ('.*')"
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|is killed by signal)")
_SCHEDULER = "lr scheduler dict"
_KEYS = {
    "optimizer configuration": ("optimizer", "lr_scheduler", "monitor"),
    _SCHEDULER: [each.name for each in fields(LRSchedulerConfig)],
}


def refusal_of(error: BaseException, module: L.LightningModule) -> ConfigError | None:
    """Return a ConfigError that says what an error of training means, or None if it says that
    itself.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ConfigError) or not frames:
        return None
    # not the call of trainer.fit
    within = itertools.dropwhile(lambda frame: is_users(frame.filename), frames)
    own = [frame for frame in within if is_users(frame.filename)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    name, last = type(module).__name__, frames[-1]
    by_lightning = last.filename.startswith(_LIGHTNING)
    if isinstance(error, MisconfigurationException) or (
        by_lightning and (last.line or "").startswith("raise ")
    ):
        return ConfigError(f"{name}{place}: {error}")
    if isinstance(error, KeyError) and by_lightning and Path(last.filename).name == "optimizer.py":
        return ConfigError(
            f"{name}.configure_optimizers returned a dict without {error}. Return the optimizer, "
            "or "
            '{"optimizer": optimizer, "lr_scheduler": scheduler}.'
        )
    if unknown := re.match(_UNKNOWN_KEYS + r"(.+?): \{(.+?)\}", str(error)) or re.match(
        _UNKNOWN_BY_HAND, str(error)
    ):
        where, keys = unknown.groups()
        known = ", ".join(_KEYS[where or _SCHEDULER])
        return ConfigError(
            f"{name}.configure_optimizers: the {where or _SCHEDULER} has {keys}. Its keys are "
            f"{known}."
        )
    if (
        isinstance(error, IsADirectoryError)
        and (Path(str(error.filename)) / directory.MANIFEST).is_file()
    ):
        return ConfigError(
            f"{name}{place}: {error.filename} is a checkpoint, which is a directory here (so are "
            "best_model_path and "
            "last_model_path). Load the trained module with armature.load(path); its state_dict() "
            "has the weights."
        )
    if isinstance(error, ValueError) and str(error) == _EMPTY:
        return ConfigError(
            f"{name}.configure_optimizers{place}: the optimizer got no parameters. "
            f"{_parameters(module)}"
        )
    return None


def advice_on(error: BaseException) -> str | None:
    """Return what to do about an error that may be gone after a restart, or None."""
    if not isinstance(error, RuntimeError) or not _DEAD_WORKER.search(str(error)):
        return None
    return (
        "A process that loads the data has ended: its code ended it, or memory or /dev/shm is "
        "full. Type "
        "data.num_workers=0 to load in the training process, which shows an error of the code; or "
        "fewer."
    )


def optimizers_problem(trainer: L.Trainer) -> str | None:
    """Return why training cannot use what `configure_optimizers` has returned, or None."""
    module = trainer.lightning_module
    name = f"{type(module).__name__}.configure_optimizers"
    if not module.automatic_optimization:  # the module's own affair
        return None
    if not trainer.optimizers:
        return (
            f"{name} returned no optimizer. Return one; or, if training_step calls optimizers or "
            "none, set "
            "self.automatic_optimization = False in __init__."
        )
    for config in trainer.lr_scheduler_configs:
        frequency: Any = config.frequency
        if not isinstance(frequency, Real) or frequency < 1 or frequency % 1:
            return (
                f"{name}: the {_SCHEDULER} has frequency={frequency!r}. Give it a whole number of "
                "at least 1: the "
                f"scheduler steps once in so many of its interval ({config.interval})."
            )
    return None


def _parameters(module: L.LightningModule) -> str:
    """Return why there may be nothing to train, and what to do."""
    if not [*module.parameters()]:
        return (
            "The module has no parameters: make its layers in __init__ or configure_model, as "
            "self.net = …"
        )
    if not any(param.requires_grad for param in module.parameters()):
        return (
            "All parameters of the module are frozen (requires_grad is False). Unfreeze those "
            "to be trained."
        )
    return "Give it self.parameters(), or those to be trained."


def loss_problem(loss: Tensor, module: Any) -> str | None:
    """Return why backward cannot begin at a loss, or None.

    Args:
        loss: what backward is to begin at, of any shape.
    """
    step = (
        "training_step returned" if module.automatic_optimization else "manual_backward was given"
    )
    what = f"{type(module).__name__}: {step} a loss"
    if not loss.requires_grad:
        if not any(param.requires_grad for param in module.parameters()):
            return f"{what} without a gradient. {_parameters(module)}"
        if not (loss.is_floating_point() or loss.is_complex()):
            return (
                f"{what} of whole numbers ({loss.dtype}), which has no gradient. Compute it "
                "from the outputs."
            )
        off = "" if torch.is_grad_enabled() else " torch.set_grad_enabled(False) is in effect."
        return (
            f"{what} without a gradient: it came from detach(), item(), argmax() or "
            "torch.no_grad(), or from no "
            f"weight of the model.{off} Return the loss as it was computed from the model's "
            "outputs."
        )
    if loss.numel() != 1:
        return f"{what} of shape {tuple(loss.shape)}. Return one number, such as loss.mean()."
    return None
