"""The progress of a run, for callbacks and data modules that also work under Lightning's own
Trainer.
"""

from typing import Any

from lightning.pytorch import Trainer


def completed_batches(trainer: Trainer) -> int:
    """Return the global batches that were trained on, over all resumes.

    Lightning's own Trainer counts optimizer steps, which is the same with automatic optimization.
    """
    completed = getattr(trainer, "completed_batches", None)
    return trainer.global_step if completed is None else completed


def feed_of(trainer: Trainer) -> Any:
    """Return what holds the position in the training data: a callback for a plain data module, else
    the data module itself.
    """
    callbacks: Any = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    feeds = (each for each in callbacks if hasattr(type(each), "samples_seen"))
    return next(feeds, getattr(trainer, "datamodule", None))
