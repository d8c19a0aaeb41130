"""What callbacks of users and of Lightning need around a run."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from armature.errors import ConfigError
from armature.layout import Layout
from armature.training.run_hooks import RunHooks
from armature.validation import combinations


class CheckCallbacks(RunHooks, Callback):
    """Check callbacks from a module's `configure_callbacks`, or from a function, as those of a
    config are checked; and after each step, that what was decided from settings still holds.
    """

    def __init__(self, cfg: DictConfig, automatic: bool, accumulate: int) -> None:
        self._cfg, self._automatic, self._accumulate = cfg, automatic, accumulate

    def training_begins(self, trainer: Trainer) -> None:
        if (set_to := trainer.accumulate_grad_batches) != self._accumulate:
            raise ConfigError(
                f"trainer.accumulate_grad_batches was {self._accumulate} and is {set_to} now: your "
                "code has set it. Here it is data.global_batch_size / (data.micro_batch_size × "
                "data ranks) in every step, which positions in the data and checkpoints count by. "
                "Type both instead."
            )
        module = trainer.lightning_module
        if (now := module.automatic_optimization) != self._automatic:
            raise ConfigError(
                f"{type(module).__name__}.automatic_optimization was {self._automatic} after "
                f"__init__ and is {now} now. The limit of steps, clipping and accumulation follow "
                f"from its value after __init__. Set self.automatic_optimization = {now} there."
            )

    step_ended = training_begins

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        kinds = dict.fromkeys(map(type, trainer.callbacks if stage == "fit" else ()))  # pyright: ignore[reportAttributeAccessIssue]
        cfg: Any = OmegaConf.to_container(self._cfg, resolve=True)
        if found := combinations.callback_problems(kinds, cfg, Layout.of(self._cfg)):
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
            if isinstance(callback, WeightAveraging) and average and not average.n_averaged:
                average.update_parameters(pl_module)
                average.n_averaged.zero_()

    on_validation_start = on_train_end = on_save_checkpoint = _begin
