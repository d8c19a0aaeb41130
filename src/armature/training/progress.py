"""The progress of a run, for callbacks that also work under Lightning's own Trainer."""

from typing import Any

from lightning.pytorch import Trainer


def completed_batches(trainer: Trainer) -> int:
    """Return the global batches that were trained on, over all resumes.

    Lightning's own Trainer counts optimizer steps, which is the same with automatic optimization.
    """
    completed = getattr(trainer, "completed_batches", None)
    return trainer.global_step if completed is None else completed


def feed_of(trainer: Trainer) -> Any:
    """Return the `Feed` (data/feed.py), which holds the position in the training data, or None."""
    callbacks: Any = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return next((each for each in callbacks if hasattr(type(each), "samples_seen")), None)
