"""Hooks of the start, which run at each start, and the load after them, which gives everything its
saved state: nothing that they change has to be undone.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger

from armature.errors import error_line
from armature.parallel import randomness
from armature.training import epoch_metrics

log = logging.getLogger(__name__)

# beginnings of modules whose code is not users'
NOT_USERS = ("armature.", "lightning.", "pytorch_lightning.")
HOOK = "on_train_epoch_start"
OF_THE_START = ("on_fit_start", "on_train_start", HOOK)


def users_hooks(trainer: Any, *names: str) -> list[tuple[Any, Callable[[], Any]]]:
    """Return the hooks of these names, or of the start, that users wrote, with their owners, in the
    order in which Lightning calls them; also those of Lightning's averages, which replace weights.
    """
    module = trainer.lightning_module
    found = []
    for name in names or OF_THE_START:
        hooks = [
            (each, partial(getattr(each, name), trainer, module)) for each in trainer.callbacks
        ]
        hooks.append((module, partial(getattr(module, name))))
        for owner, hook in hooks:
            module_name = getattr(hook.func, "__module__", "")
            averages = module_name == WeightAveraging.__module__
            if averages or not f"{module_name}.".startswith(NOT_USERS):  # these save what they need
                found.append((owner, hook))
    return found


def random_state(trainer: Any) -> dict[str, Any] | None:
    """Return this rank's random state if a user's hook may draw from it at an epoch's start."""
    return randomness.capture() if users_hooks(trainer, HOOK) else None


def repeat(trainer: Any, drawn_from: dict[str, Any] | None) -> None:
    """Call the users' `on_train_epoch_start` again after a resume inside an epoch: what it sets for
    the epoch depends on its number.

    Args:
        drawn_from: the random state when the hook was called first; None: the current one.
    """
    with silent(trainer):
        if drawn_from is not None:
            randomness.restore(drawn_from)
        call_all(
            [(owner, HOOK, hook) for owner, hook in users_hooks(trainer, HOOK)],
            when="it was called again after the resume inside an epoch",
            then="What it sets for the epoch, and no checkpoint holds, is as it was at the start "
            "of the process.",
        )


def load_again(trainer: Any) -> None:
    """Load the checkpoint of a resume once more if users have hooks of the start. Called by all
    ranks, after these and before the first batch.
    """
    strategy, connector = trainer.strategy, trainer._checkpoint_connector
    if not strategy.loads_optimizers_last:
        return
    strategy.loads_optimizers_last = False
    connector.resume_start(trainer.ckpt_path)
    connector.restore_model()
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector.restore_precision_plugin_state()
    connector.restore_optimizers_and_schedulers()
    connector.resume_end()
    strategy.loading_ended()


def call_all(hooks: Iterable[tuple[Any, str, Callable[[], Any]]], *, when: str, then: str) -> None:
    """Call users' hooks, given with their owners and names.

    One that fails is reported, and the others are called.

    Args:
        when, then: at what it failed and what follows from it, for the report.
    """
    for owner, name, hook in hooks:
        try:
            hook()
        except Exception as error:
            log.warning(
                "%s.%s failed when %s (%s). %s",
                type(owner).__name__, name, when, error_line(error), then,
            )  # fmt: skip


@contextmanager
def silent(trainer: Any) -> Iterator[None]:
    """Log nothing, and draw nothing of the run's random numbers."""
    loggers, drawn = trainer.loggers, randomness.capture()
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with epoch_metrics.without_logging(trainer.lightning_module, *trainer.callbacks):
            yield
    finally:
        trainer.loggers = loggers
        randomness.restore(drawn)
