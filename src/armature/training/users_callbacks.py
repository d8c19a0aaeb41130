"""What callbacks of users and of Lightning need around a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from omegaconf import DictConfig
from typing_extensions import override

from armature.errors import ConfigError
from armature.layout import Layout
from armature.training.run_hooks import RunHooks
from armature.validation import lightning_callbacks


class CheckCallbacks(RunHooks, Callback):
    """Check callbacks from a module's `configure_callbacks`, or from a function, as those of a
    config are checked; and after each step, that what was decided from settings still holds.
    """

    def __init__(self, cfg: DictConfig, check_unchanged: Callable[[Trainer], None]) -> None:
        self._cfg, self._check_unchanged = cfg, check_unchanged

    def training_begins(self, trainer: Trainer) -> None:
        self._check_unchanged(trainer)

    step_ended = training_begins

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Any] = trainer.callbacks if stage == "fit" else []  # pyright: ignore[reportAttributeAccessIssue]
        kinds, layout = dict.fromkeys(type(each) for each in callbacks), Layout.of(self._cfg)
        found = [lightning_callbacks.problem_of_object(kind, self._cfg, layout) for kind in kinds]
        if found := [*filter(None, found)]:
            raise ConfigError(found)


class BeginAverages(Callback):
    """Let each `WeightAveraging` hold the weights until its first update.

    Lightning validates, saves and ends the training with the average, which holds the initial
    weights as long as it has no update: one that starts late would judge those.
    """

    def _begin(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            average = getattr(callback, "_average_model", None)
            if not isinstance(callback, WeightAveraging) or average is None:
                continue
            if not average.n_averaged:
                average.update_parameters(pl_module)
                average.n_averaged.zero_()

    on_validation_start = on_train_end = on_save_checkpoint = _begin
