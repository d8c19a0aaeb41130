"""One class for each sample."""

from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from armature.models.loss import IGNORED
from armature.tasks.base import Batch, Task, WeightedMean, inputs_and_targets


class Classification(Task):
    """Logs the loss in nats per sample, and accuracy: the share of samples whose likeliest class is
    right.

    The training loss is the model's `loss`, such as `VisionTransformer.loss`. A model without that
    method returns its loss from `forward(inputs, targets)`, and evaluation calls it twice.
    """

    metric_names = ("loss", "accuracy")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return each sample's likeliest class, and the probability of it: columns of
        scripts/predict.py.
        """
        assert self.model is not None
        probability, index = self.model(batch["inputs"]).float().softmax(dim=-1).max(dim=-1)
        return {"class": index, "probability": probability}

    @override
    def metrics(self) -> dict[str, Metric]:
        return {"loss": WeightedMean(), "accuracy": WeightedMean()}

    @override
    def update(self, metrics: dict[str, Metric], batch: Batch) -> None:
        assert self.model is not None
        inputs, targets = inputs_and_targets(batch)
        outputs = self.model(inputs)
        counted = targets != IGNORED
        has_loss = callable(getattr(self.model, "loss", None))
        loss = self.model.loss(outputs, targets) if has_loss else self.loss_of(batch)  # pyright: ignore[reportCallIssue]
        metrics["loss"].update(loss, weight=counted.sum())
        metrics["accuracy"].update(outputs.argmax(dim=-1) == targets, weight=counted)


class TextClassification(Classification):
    """Logs the loss in nats per text, and accuracy: see `Classification`."""

    modality = "labeled texts"
