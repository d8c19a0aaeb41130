"""The progress of a run, for callbacks and data modules that also work under Lightning's own Trainer."""

from lightning.pytorch import Trainer


def completed_batches(trainer: Trainer) -> int:
    """Return the global batches that were trained on, over all resumes.

    Lightning's own Trainer counts optimizer steps, which is the same with automatic optimization.
    """
    completed = getattr(trainer, "completed_batches", None)
    return trainer.global_step if completed is None else completed
