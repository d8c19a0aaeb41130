"""What Lightning's own callbacks need for a resume at any step."""

from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from armature.errors import ConfigError
from armature.layout import Layout
from armature.training import hook_check
from armature.training.progress import data_of
from armature.training.trainer import Trainer as OurTrainer
from armature.validation import lightning_callbacks


class CheckCallbacks(Callback):
    """Check callbacks from a module's `configure_callbacks`, or from a function, as those of a
    config are checked.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError for callbacks that cannot be right, before any of them begins."""
        if stage != "fit":
            return
        layout, callbacks = Layout.of(self._cfg), trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        kinds = dict.fromkeys(type(each) for each in callbacks)
        of_kinds = [
            lightning_callbacks.problem_of_object(kind, self._cfg, layout) for kind in kinds
        ]
        found = [each for each in of_kinds if each is not None]
        # other data tell by test_dataloader
        one = getattr(data_of(trainer), "has_one_test_loader", False)
        one = one and self._cfg.trainer.test_at_end and trainer.limit_test_batches != 0
        if one and is_overridden("test_step", pl_module):
            found += hook_check.all_loader_problems(
                pl_module, callbacks, stage="test", several=False
            )
        hook_check.check(*callbacks, base=Callback, problems=found)


class BeginAverages(Callback):
    """Let Lightning's averages of weights be the weights themselves until their first update.

    Lightning validates, saves and ends the training with the average, which holds the initial
    weights as long as it has no update: one that starts late would judge those.
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            average = getattr(callback, "_average_model", None)
            if (
                isinstance(callback, WeightAveraging)
                and average is not None
                and not average.n_averaged
            ):
                average.update_parameters(pl_module)
                average.n_averaged.zero_()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.on_validation_start(trainer, pl_module)


def prepare(trainer: OurTrainer) -> None:
    """Before the first batch: prepare what an epoch's start would make, and refuse what cannot be
    right.

    Raises:
        ConfigError: stochastic weight averaging of a model with BatchNorm.
    """
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, StochasticWeightAveraging):
            if callback._model_contains_batch_norm:
                raise ConfigError(
                    "callbacks: StochasticWeightAveraging computes BatchNorm's statistics in an "
                    "additional epoch, "
                    "which a run of a set number of steps does not have. Type callbacks=ema, which "
                    "averages them too."
                )
            if callback._scheduler_state is not None:
                trainer.fit_loop.before_first_batch.append(
                    partial(_restore_schedule, callback, trainer)
                )


def _restore_schedule(callback: StochasticWeightAveraging, trainer: Trainer) -> None:
    """Make the schedule, as at an epoch's start, without the step that its constructor takes."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    values = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, saved in zip(groups, values, strict=True):
        group.update(saved)
