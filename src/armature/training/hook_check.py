"""Check the hooks that users define against how they are called, before training: one of the end
would cost a run.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from armature.errors import ConfigError
from armature.parallel import process_group

log = logging.getLogger(__name__)

Call = tuple[list[str], list[str]]  # the names of a hook's arguments by position, and by keyword
LOADER = "dataloader_idx"
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_NAMED = (
    *STEPS,
    "setup",
    "teardown",
    "prepare_data",
    "configure_optimizers",
    "configure_callbacks",
    "configure_model",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "backward",
    "transfer_batch_to_device",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
# arguments that are passed by their names
_BY_NAME = ("stage", "gradient_clip_val", "gradient_clip_algorithm")
# hooks of Lightning 1 that nothing calls; those that Lightning 2 refuses itself are left out
REMOVED = {
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "configure_model",
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_keyboard_interrupt": "on_exception",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
    "tbptt_split_batch": "training_step",
    "get_progress_bar_dict": "log",
}
_LIKE = 0.92  # of difflib: on_train_epoch_ends is meant to be on_train_epoch_end


def check(*owners: Any, base: type, problems: Sequence[str] = ()) -> None:
    """Raise ConfigError for hooks that cannot be called, and warn of methods that look like hooks.

    Args:
        owners: modules, data modules or callbacks.
        base: the class of Lightning that defines their hooks.
        problems: others, to be told with these.
    """
    if found := [*problems, *(each for owner in owners for each in problems_of(owner, base))]:
        raise ConfigError(found)
    for text in (each for owner in owners for each in warnings_of(owner, base)):
        if process_group.rank() == 0:
            log.warning("%s", text)


def problems_of(owner: Any, base: type) -> list[str]:
    """Return which hooks of a module, data module or callback cannot be called as they will be.

    Args:
        base: the class of Lightning that defines the hooks.
    """
    found = (
        _problem(owner, name, base, _calls(name, getattr(base, name))) for name in _hooks(base)
    )
    return [each for each in found if each is not None]


def all_loader_problems(
    module: L.LightningModule, callbacks: Sequence[L.Callback], *, stage: str, several: bool
) -> list[str]:
    """Return `loader_problems` of a module and callbacks."""
    owners: list[tuple[Any, type]] = [
        (module, L.LightningModule),
        *((each, L.Callback) for each in callbacks),
    ]
    of_owners = [
        loader_problems(owner, base, stage=stage, several=several) for owner, base in owners
    ]
    return [each for of_owner in of_owners for each in of_owner]


def loader_problems(owner: Any, base: type, *, stage: str, several: bool) -> list[str]:
    """Return which hooks of evaluated batches cannot be called with this number of loaders.

    Args:
        stage: validation or test.
        several: whether there are several loaders, one after another, so that hooks are called with
            `dataloader_idx`.
    """
    found, why = (
        [],
        f"there {'are several' if several else 'is one'} {stage} loader{'s' * several}, so ",
    )
    for name in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
        if hasattr(base, name) and "dataloader_iter" not in _parameters(getattr(owner, name, None)):
            calls = [
                call for call in _calls(name, getattr(base, name)) if (LOADER in call[0]) == several
            ]
            found.append(
                _problem(owner, name, base, calls, why=why, define=[*calls[0][0], f"{LOADER}=0"])
            )
    return [each for each in found if each is not None]


def _problem(
    owner: Any,
    name: str,
    base: type,
    calls: Sequence[Call],
    *,
    why: str = "",
    define: Sequence[str] | None = None,
) -> str | None:
    """Return that a hook of the user's takes none of these calls, and how to define it, or None."""
    own = getattr(owner, name, None)
    if not _is_own(name, owner, base):
        return None
    try:
        signature = inspect.signature(own)  # pyright: ignore[reportArgumentType]
        called = inspect.signature(own, follow_wrapped=False)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):  # not written in Python
        return None
    if any(_takes(each, *call) for call in calls for each in (signature, called)):
        return None
    args, keywords = calls[0]
    arguments = ", ".join(("self", *([*args, *keywords] if define is None else define)))
    return (
        f"{type(owner).__name__}.{name}{signature}: {why}it is called with "
        f"({', '.join((*args, *keywords))})."
        f"{_advice(signature, args)} Define it as def {name}({arguments})."
    )


def warnings_of(owner: Any, base: type) -> list[str]:
    """Return which methods look like hooks and are none, so that nothing calls them."""
    hooks, found = _hooks(base), []
    for name in _defined(owner, base):
        near = difflib.get_close_matches(name, hooks, n=1, cutoff=_LIKE)
        meant = REMOVED.get(name) or (near[0] if near else None)
        if meant is not None and not (meant in hooks and _is_own(meant, owner, base)):
            since = "Lightning 2 has no such hook" if name in REMOVED else "there is no such hook"
            found.append(f"{type(owner).__name__}.{name} is never called: {since}. Use {meant}.")
    return found


def _is_own(name: str, owner: Any, base: type) -> bool:
    """Return whether a hook is the user's.

    False if Lightning cannot tell, as of an object that is called.
    """
    try:
        return callable(getattr(owner, name, None)) and is_overridden(name, owner, base)
    except AttributeError:
        return False


def _hooks(base: type) -> list[str]:
    names = (name for name in dir(base) if name.startswith("on_") or name in _NAMED)
    return [name for name in names if inspect.isfunction(inspect.getattr_static(base, name))]


def _parameters(hook: Any) -> Collection[str]:
    try:
        return inspect.signature(hook).parameters
    except (TypeError, ValueError):  # no hook, or not written in Python
        return ()


def _calls(name: str, hook: Callable[..., Any]) -> list[Call]:
    """Return the ways in which a hook may be called: the names of its arguments by position, and by
    keyword.
    """
    if name in STEPS:
        ways = [["batch", "batch_idx"], ["batch"], ["batch", "batch_idx", LOADER]]
        return [(way, []) for way in (ways[:2] if name == "training_step" else ways)]
    taken = [*inspect.signature(hook).parameters.values()][1:]
    needed = [
        each.name
        for each in taken
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if name in ("configure_gradient_clipping", "optimizer_step"):  # their defaults are not used
        needed = [each.name for each in taken]
    by_name = [each for each in needed if each in _BY_NAME]
    ways = [([each for each in needed if each not in by_name], by_name)]
    names = [each.name for each in taken]
    # which is passed if there are several loaders
    return [*ways, (names, [])] if LOADER in names else ways


def _takes(signature: inspect.Signature, args: list[str], keywords: list[str]) -> bool:
    try:
        signature.bind(*args, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _advice(signature: inspect.Signature, args: list[str]) -> str:
    if "optimizer_idx" in signature.parameters:
        return (
            " Lightning 2 has no optimizer_idx: for several optimizers set "
            "self.automatic_optimization = False in "
            "__init__, and call opt1, opt2 = self.optimizers() in training_step."
        )
    if "outputs" in signature.parameters and "outputs" not in args:
        return " Lightning 2 keeps no outputs: append them to a list in the step."
    return ""


def _defined(owner: Any, base: type) -> Iterator[str]:
    """Yield the methods of the user's classes that Lightning's class does not have, and that none
    of them names.
    """
    libraries = ("armature", "lightning", "torch", "builtins")
    classes = [
        cls for cls in type(owner).__mro__ if cls.__module__.partition(".")[0] not in libraries
    ]
    methods = {
        name: made
        for cls in classes
        for name, made in vars(cls).items()
        if inspect.isfunction(made)
    }
    named = {name for made in methods.values() for name in made.__code__.co_names}
    yield from (
        name
        for name in methods
        if not (hasattr(base, name) or name in named or name.startswith("_"))
    )
