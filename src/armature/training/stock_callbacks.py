"""What Lightning's own callbacks need for a resume at any step."""

from functools import partial

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

from armature.errors import ConfigError
from armature.training.trainer import Trainer as OurTrainer


def prepare(trainer: OurTrainer) -> None:
    """Before the first batch: prepare what an epoch's start would make, and refuse what cannot be right.

    Raises:
        ConfigError: stochastic weight averaging of a model with BatchNorm.
    """
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, StochasticWeightAveraging):
            if callback._model_contains_batch_norm:
                raise ConfigError(
                    "callbacks: StochasticWeightAveraging computes BatchNorm's statistics in an additional epoch, "
                    "which a run of a set number of steps does not have. Type callbacks=ema, which averages them too."
                )
            if callback._scheduler_state is not None:
                trainer.fit_loop.before_first_batch.append(partial(_restore_schedule, callback, trainer))


def _restore_schedule(callback: StochasticWeightAveraging, trainer: Trainer) -> None:
    """Make the schedule, as at an epoch's start, without the step that its constructor takes."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    values = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, saved in zip(groups, values, strict=True):
        group.update(saved)
