"""Lightning's Trainer with our loops and without its signal handlers."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from typing_extensions import override

from armature.training.loops import EpochLoop, FitLoop
from armature.training.progress import feed_of

log = logging.getLogger(__name__)


class NoSignals:
    """Stands in for Lightning's signal handlers, which enter collectives and may hang."""

    received_sigterm = False

    def register_signal_handlers(self) -> None:
        """Register nothing: training/stop.py has the handlers."""

    def teardown(self) -> None:
        """There is nothing to restore."""


class CheckpointConnector(_CheckpointConnector):
    """Lightning's, which starts no run from a file that happens to be there.

    Without a checkpoint Lightning starts `fit` from the file of an OnExceptionCheckpoint, or from
    one that it saved itself under Slurm, whichever run has left it. A run of `train.py` continues
    from its own checkpoints alone.
    """

    @override
    def _parse_ckpt_path(
        self, state_fn: Any, ckpt_path: Any, model_provided: bool, model_connected: bool
    ) -> Any:
        if ckpt_path is None and model_provided:
            return None
        return super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)


class LoggerConnector(_LoggerConnector):
    """Lightning's, with the number of completed global batches as the step, and no work for values
    that nobody logs.

    Attributes:
        reserved: names of the columns of `StepLog`. A module's values of these names are logged
            under others.
        epoch: returns the `epoch` of the rows that `StepLog` writes; None: Lightning's number of
            the epoch.
        step_values: names in `callback_metrics` whose values come from `StepLog`, since the module
            logs none.
    """

    def __init__(self, trainer: "Trainer") -> None:
        super().__init__(trainer)
        self._trainer = trainer
        self.reserved: frozenset[str] = frozenset()
        self.epoch: Callable[[], float] | None = None
        self.step_values: set[str] = set()

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if not self.trainer.loggers or not metrics:
            return
        self._logged_metrics.update(metrics)
        named = {
            self._logged_name(name): value
            for name, value in convert_tensors_to_scalars(metrics).items()
        }
        epoch = {}
        if step is None and "step" in named:
            step = int(named.pop("step"))
        elif step is None:
            epoch = {"epoch": self.trainer.current_epoch if self.epoch is None else self.epoch()}
            step = self._trainer.completed_batches
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics=epoch | named, step=step)
            logger.save()

    def _logged_name(self, name: str) -> str:
        if name not in self.reserved:
            return name
        if not name.startswith("train/"):
            return f"{name}_module"
        return f"{name}_epoch" if self._first_loop_iter is None else f"{name}_step"

    @override
    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        if self._reduces:
            self.metrics  # noqa: B018  all ranks compute them now: a hook on rank 0 may read them, as RichProgressBar

    @override
    def on_epoch_end(self) -> None:
        for metric in (self.trainer._results or {}).values() if self._reduces else ():
            if not metric.is_tensor and metric.value._computed is None:  # a hook has updated it
                metric._computed = None
        super().on_epoch_end()

    @property
    def _reduces(self) -> bool:
        trainer = self._trainer
        return (
            trainer._results is not None and trainer.world_size > 1 and not trainer.sanity_checking
        )

    def publish(self, values: Mapping[str, float]) -> None:
        """Set values of `callback_metrics`, for callbacks that monitor them, except those that the
        module logs.
        """
        logged = {metric.meta.name for metric in self.trainer.fit_loop.epoch_loop._results.values()}
        self.step_values = (self.step_values | (values.keys() - self._callback_metrics)) - logged
        for name in self.step_values & values.keys():
            self._callback_metrics[name] = torch.tensor(values[name])


class Trainer(L.Trainer):
    """Train as Lightning's Trainer does, with these differences:

    - training/stop.py handles signals, instead of handlers that enter collectives and may hang;
    - validation also runs after the last step, where a number of steps ends the run, and a resumed
      one starts anew (training/loops.py);
    - `training_step(dataloader_iter)` keeps all gradients of a global batch: Lightning clears those
      of the first one;
    - loggers receive the number of completed global batches as the step, in training, validation
      and test; values of single batches of validation and test keep Lightning's count.

    Args:
        max_global_batches: see `EpochLoop`.
        kwargs: Lightning's.

    Attributes:
        failed: whether this rank ends with an error, which the others may not have. Nothing is
            saved after it.
    """

    # Lightning reads the names of arguments here, for PL_TRAINER_* variables
    __signature__ = inspect.signature(L.Trainer)

    def __init__(self, *, max_global_batches: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.failed = False
        limits = self.fit_loop  # fast_dev_run may have changed them
        self.fit_loop: FitLoop = FitLoop(self, limits)
        self.fit_loop.epoch_loop = EpochLoop(self, limits, max_global_batches=max_global_batches)
        self._logger_connector: LoggerConnector = LoggerConnector(self)
        self._signal_connector = NoSignals()
        self._checkpoint_connector = CheckpointConnector(self)

    @override
    def save_checkpoint(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Save as Lightning's, unless this is one of several ranks and has failed: it would wait
        for the others.
        """
        if self.failed and self.world_size > 1:
            log.warning(
                "%s is not saved after an error: that needs all %d ranks, and the others may not "
                "have failed. "
                "The run's own checkpoints are kept: the same command continues from the last one.",
                filepath, self.world_size,
            )  # fmt: skip
            return
        super().save_checkpoint(filepath, *args, **kwargs)

    @property
    @override
    def max_steps(self) -> int:
        """Lightning's limit; without one `max_global_batches`, which ends a run with manual
        optimization.
        """
        limit = self.fit_loop.epoch_loop.max_global_batches
        return self.fit_loop.max_steps if limit is None or self.fit_loop.max_steps != -1 else limit

    @property
    @override
    def train_dataloader(self) -> Any:
        """For hooks: a loader of their own, so that the training loop's is never set back."""
        loaders, feed = super().train_dataloader, feed_of(self)
        return loaders if loaders is None or feed is None else feed.share()

    @property
    def completed_batches(self) -> int:
        """Global batches trained on so far, over all resumes: see `EpochLoop.completed_batches`."""
        return self.fit_loop.epoch_loop.completed_batches

    @property
    def step_metrics(self) -> LoggerConnector:
        """Where `StepLog` announces its columns and publishes its newest row."""
        return self._logger_connector
