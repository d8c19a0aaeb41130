"""A Trainer in the test's own process, without logger, files and screen."""

from typing import Any

from armature.strategies.single import SingleDevice
from armature.training.trainer import Trainer


def quiet_trainer(**settings: Any) -> Trainer:
    """Return a Trainer on CPUs, in one process unless the settings name another strategy."""
    return Trainer(
        **{
            "accelerator": "cpu",
            "strategy": SingleDevice(),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            **settings,
        }
    )
