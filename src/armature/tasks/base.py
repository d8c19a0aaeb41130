"""The base class of all tasks: builds the model and its optimizer, and computes exact metrics under
every layout.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from armature.errors import ConfigError
from armature.finetune.lora import Lora
from armature.models.loss import IGNORED
from armature.optim.groups import parameter_groups

Batch = dict[str, Tensor]


class WeightedMean(MeanMetric):
    """A weighted mean over samples and ranks.

    NaN stays NaN, without the checks that wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        # bf16-true makes bf16 the default, in which a sum over many batches stalls
        self.set_dtype(torch.promote_types(self.dtype, torch.float32))

    @override
    def update(self, value: float | Tensor, weight: float | Tensor = 1.0) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add values and their weights, which are broadcast to the values' shape."""
        value, weight = (
            torch.as_tensor(each, dtype=self.dtype, device=self.device) for each in (value, weight)
        )
        self.mean_value += (value * weight).sum()
        self.weight += weight.expand_as(value).sum()


def inputs_and_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the batch's inputs and targets. Raises TypeError for a batch of another form."""
    try:
        return batch["inputs"], batch["targets"]
    except (KeyError, TypeError, IndexError):
        form = (
            f"the keys {', '.join(map(str, batch))}"
            if isinstance(batch, dict)
            else f"a {type(batch).__name__}"
        )
        raise TypeError(
            f'A batch has {form}: each sample of `dataset(split)` must be {{"inputs": Tensor, '
            f'"targets": Tensor}}. For samples of another form, write a task whose training_step, '
            "validation_step and test_step read them."
        ) from None


class Task(L.LightningModule):
    """Trains the model on the loss that the model computes, and measures that loss on held-out
    batches.

    `model`, `optimizer` and `scheduler` are factories: no arguments, parameter groups, (optimizer,
    total_steps).
    `adapter` freezes the model and adds what is trained instead (`armature.finetune.lora.Lora`).
    A subclass adds metrics in `metrics`, `update` and `final_metrics`.

    Attributes:
        mean_over_targets: the loss of `training_step` is a mean over `batch["targets"]` that are
            not -100. Each target of an optimizer step then has the same weight, whichever
            micro-batch it lies in.
        metric_names: of what a task of this folder logs as val/NAME and test/NAME, for the check
            of monitors before launch.
    """

    mean_over_targets = True
    metric_names: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(
        self,
        model: Callable[[], nn.Module],
        *,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        adapter: Lora | None = None,
    ) -> None:
        super().__init__()
        self.adapter = adapter
        self.model: nn.Module | None = None
        self._make_model, self._make_optimizer, self._make_scheduler = model, optimizer, scheduler
        # A plain dict: a strategy would move, empty or shard submodules together with the model
        self._metrics: dict[str, Metric] = {}

    @override
    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, map_location: Any = None, *args: Any, **kwargs: Any
    ) -> Self:
        """Return a trained task, in evaluation mode if it comes from a run.

        Args:
            checkpoint_path: a run directory, or a checkpoint in one, whose config.yaml says which
                model it is; or a .ckpt from elsewhere, for which Lightning's own function needs
                `model`, `optimizer` and `scheduler`.
            map_location: the device; None: the CPU.
            kwargs: arguments of the constructor that override the run's.
        """
        from armature import loading

        if isinstance(checkpoint_path, str | Path) and loading.run_of(Path(checkpoint_path)):
            return loading.load(
                checkpoint_path, device=str(map_location or "cpu"), expect=cls, **kwargs
            )  # pyright: ignore[reportReturnType]
        return super().load_from_checkpoint(checkpoint_path, map_location, *args, **kwargs)

    @override
    def configure_model(self) -> None:
        """Build the model: without memory if it can initialize itself by name, which the strategy
        then does.
        """
        if self.model is None:
            self.model = self.new_model()

    def new_model(self) -> nn.Module:
        """Return a model with the task's adapters, on the meta device if it can leave it."""
        model_class = getattr(self._make_model, "func", self._make_model)
        with (
            torch.device("meta") if hasattr(model_class, "initialize_parameter") else nullcontext()
        ):
            model = self._make_model()
            if isinstance(self.adapter, Lora):
                self.adapter.add_to(model)
        return model

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.model is not None
        optimizer = self._make_optimizer(parameter_groups(self.model))
        if self._make_scheduler is None:
            return optimizer
        total_steps = (
            self.trainer.max_steps
            if self.trainer.max_steps > 0
            else self.trainer.estimated_stepping_batches
        )
        scheduler = self._make_scheduler(optimizer, total_steps=int(total_steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch.

        The model computes it, in `loss` (src/armature/models/<name>/model.py): a pipeline needs the
        loss on the stage that holds the model's last part.
        """
        return self.loss_of(batch)

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the model's loss of a batch: the mean over its targets.

        A batch with "documents" (B, T) packs several, which do not attend to each other.
        """
        assert self.model is not None
        inputs, targets = inputs_and_targets(batch)
        if not isinstance(batch, dict) or "documents" not in batch:
            return self.model(inputs, targets)
        if "documents" not in inspect.signature(type(self.model).forward).parameters:
            raise ConfigError(
                f"{type(self.model).__name__}.forward takes no documents (B, T): packed "
                "conversations would be mixed. Type data.source.packing=false."
            )
        return self.model(inputs, targets, documents=batch["documents"])

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics of one evaluation, by name.

        Each is a sum over samples and ranks, so it is exact.
        """
        return {"loss": WeightedMean()}

    def update(self, metrics: dict[str, Metric], batch: Batch) -> None:
        """Add one batch. A batch of padding, whose targets are all -100, has no weight."""
        loss, counted = self.loss_of(batch), batch["targets"] != IGNORED
        # -100.0 may be a number to predict, as in training
        if batch["targets"].is_floating_point():
            counted = counted.any().expand_as(counted)
        metrics["loss"].update(loss, weight=counted.sum())

    def final_metrics(self, values: dict[str, float], split: str) -> dict[str, float]:
        """Return what is logged for `split` ("val" or "test"), given the computed metrics."""
        return values

    def preview(self) -> str | None:
        """Return text that shows what was learned, or None: at validations and at the end.

        Called on every rank.
        """
        return None

    @override
    def on_validation_epoch_start(self) -> None:
        self._metrics = {}  # an evaluation that failed has left some

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.update(self._of_this_epoch(), batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    on_test_epoch_start, test_step = on_validation_epoch_start, validation_step

    @override
    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    def _of_this_epoch(self) -> dict[str, Metric]:
        self._metrics = self._metrics or {
            name: metric.to(self.device) for name, metric in self.metrics().items()
        }
        return self._metrics

    def _log_metrics(self, split: str) -> None:
        values = {name: float(metric.compute()) for name, metric in self._of_this_epoch().items()}
        self._metrics = {}
        self.log_dict(
            {f"{split}/{name}": value for name, value in self.final_metrics(values, split).items()}
        )
