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


def data_of(trainer: Trainer) -> Any:
    """Return the data module that trains, or None.

    `trainer.datamodule` is the user's if that is a plain one.
    """
    own = getattr(trainer, "run_data", None)
    return getattr(trainer, "datamodule", None) if own is None else own
