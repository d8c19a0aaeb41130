"""End hopeless trials of `sweep=optuna`."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from armature.training.progress import completed_batches


class Prune(Callback):
    """Report the monitored value after each validation, and end the trial if the study's pruner
    says so.

    Rank 0 asks; all ranks end together, as after EarlyStopping. `sweep=optuna` adds this callback
    to its trials.

    Args:
        monitor: the logged value that the sweep compares.
    """

    def __init__(self, *, monitor: str) -> None:
        self.monitor = monitor

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        value = trainer.callback_metrics.get(self.monitor)
        hopeless = False
        if trainer.is_global_zero and value is not None:
            from armature.sweeps import search

            folder, step = Path(trainer.default_root_dir), completed_batches(trainer)
            hopeless = search.is_hopeless(folder, step, float(value))
        if trainer.strategy.reduce_boolean_decision(hopeless, all=False):
            trainer.should_stop = True
