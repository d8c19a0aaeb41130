"""The moments of a run that our own callbacks need, and for which Lightning has no hook."""

from typing import Any


class RunHooks:
    """Mixed into a callback; called in the order of the trainer's callbacks."""

    def training_begins(self, trainer: Any) -> None:
        """When everything is set up and restored and no batch is fetched.

        Also if a resumed run has no step left.
        """

    def first_batch_follows(self, trainer: Any) -> None:
        """After all `on_train_start` hooks."""

    def step_continues(self, trainer: Any) -> None:
        """After them, and with the random state of the step: what a stop has left of it."""

    def step_ended(self, trainer: Any) -> None:
        """After each global batch, when every hook of its last micro-batch has run, before
        validation.

        A checkpoint that is saved here holds the whole step.
        """

    def validation_ended(self, trainer: Any) -> None:
        """When every hook of a validation's end has run, the module's own too."""

    def training_ends(self, trainer: Any) -> None:
        """Before all `on_train_end` hooks."""

    def training_ended(self, trainer: Any) -> None:
        """After them, the module's own too."""


def call(trainer: Any, name: str) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, RunHooks):
            getattr(callback, name)(trainer)
